"""Recipes: options that train a model well on a data set. Each recipe is a small YAML file.

``options`` are those of the command line, without the dashes. A file may also contain a description (``about``) and the
expected accuracy with its source (``expect``). Both are only for the reader. This module does not import torch.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any

# The recipe that ``ddptrain --data X`` uses if none is given.
RECIPES = {
    "digits": "digits-digitsnet",
    "mnist": "mnist-convnet",
    "cifar10": "cifar10-resnet18",
    "cifar100": "cifar100-resnet18",
    "folder": "folder-resnet18",
    "synthetic": "synthetic-convnet",
    "text": "text-gpt",
}


def recipe_names() -> tuple[str, ...]:
    """Return the names of the recipes that come with ddptrain."""
    return tuple(sorted(file.name[:-5] for file in files(__name__).iterdir() if file.name.endswith(".yaml")))


def read_recipe(name: str) -> list[str]:
    """Return the options of a recipe (its name, or a YAML file) as a command line.

    Raises ValueError, whose message is one line, if the recipe does not exist or is not valid.
    """
    import yaml

    if name in recipe_names():
        text = files(__name__).joinpath(f"{name}.yaml").read_text()
    elif name.endswith((".yaml", ".yml")):
        try:
            text = Path(name).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name} cannot be read: {getattr(error, 'strerror', None) or 'not text'}") from None
    else:
        raise ValueError(f"{name!r} is not one of {', '.join(recipe_names())}, and not a .yaml file")
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {' '.join(str(error).split())}") from None
    allowed = {"about", "options", "expect"}
    if not isinstance(values, dict) or not isinstance(values.get("options"), dict) or values.keys() - allowed:
        raise ValueError(
            f"{name} is not a recipe: it must have the key 'options' (a mapping), and may have 'about' and 'expect'"
        )
    return [_argument(key, value) for key, value in values["options"].items()]


def _argument(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{key}" if value else f"--no-{key}"
    if isinstance(value, list):
        value = ",".join(map(str, value))
    return f"--{key}={value}"
