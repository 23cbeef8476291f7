"""Recipes: options that train a model well on a data set. Each recipe is a small YAML file. Does not import torch.

A file contains a description (``about``), ``options`` as on the command line without the dashes, and the accuracy to
``expect`` with its source.
"""

from dataclasses import dataclass
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


class RecipeError(Exception):
    """A recipe does not exist or is not valid. The message is one line."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The content of a recipe file."""

    about: str
    arguments: tuple[str, ...]  # a command line
    accuracy: float | None  # on the test images, in %; None: not measured
    source: str  # of the accuracy


def recipe_names() -> tuple[str, ...]:
    """Return the names of the recipes that come with ddptrain."""
    return tuple(
        sorted(file.name.removesuffix(".yaml") for file in files(__name__).iterdir() if file.name[-5:] == ".yaml")
    )


def read_recipe(name: str) -> Recipe:
    """Read a recipe that comes with ddptrain, given its name, or a YAML file. Raises RecipeError."""
    import yaml

    if name in recipe_names():
        text = files(__name__).joinpath(f"{name}.yaml").read_text()
    elif name.endswith((".yaml", ".yml")):
        try:
            text = Path(name).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{name} cannot be read: {getattr(error, 'strerror', None) or 'not text'}") from None
    else:
        raise RecipeError(f"{name!r} is not one of {', '.join(recipe_names())}, and not a .yaml file")
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{name} is not YAML: {' '.join(str(error).split())}") from None
    return _checked(name, values)


def _checked(name: str, values: Any) -> Recipe:
    allowed = {"about", "options", "expect"}
    if not isinstance(values, dict) or not isinstance(values.get("options"), dict) or values.keys() - allowed:
        raise RecipeError(
            f"{name} is not a recipe: it must have the key options (a mapping), and may have about and expect"
        )
    expect = values.get("expect") or {}
    return Recipe(
        about=str(values.get("about", "")),
        arguments=tuple(word for key, value in values["options"].items() for word in _words(str(key), value)),
        accuracy=expect.get("accuracy"),
        source=str(expect.get("source", "")),
    )


def _words(key: str, value: Any) -> tuple[str, ...]:
    """Return an option as the words of a command line."""
    if isinstance(value, bool):
        return (f"--{key}",) if value else (f"--no-{key}",)
    if isinstance(value, list):
        value = ",".join(str(part) for part in value)
    return (f"--{key}={value}",)
