"""Every recipe runs, from its YAML file to its last checkpoint, on a small data set in its real format."""

import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import yaml
from tests.messages import assert_names, refused
from tests.unit.ddptrain.formats import write_cifar, write_mnist, write_pictures
from torch import nn
from torchvision.models import vision_transformer

from ddprank.signals import Signals
from ddptrain import recipes
from ddptrain.cifarnet import Conv
from ddptrain.config import parse_options
from ddptrain.data.base import ImageShape
from ddptrain.main import run
from ddptrain.models import build_model
from ddptrain.optimizer import build_optimizer
from ddptrain.recipes import RECIPES, recipe_names

SMALL = {"folder": ("--image-size=32",), "synthetic": ("--synthetic-samples=64",)}


def weights(path: Path, name: str) -> Path:
    size_px = 32
    model = build_model(name, ImageShape(channels=3, size_px=size_px, classes=1000), stem="imagenet")
    torch.save(model.state_dict(), path)
    return path


def shallow(build: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """Build a vision transformer of 2 layers instead of 12 or more, whose checkpoint is 1 GB."""
    return lambda **how: build(**how | {"num_layers": 2})


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vision_transformer, "_vision_transformer", shallow(vision_transformer._vision_transformer))
    given = parse_options([f"--recipe={name}"], {})
    data = given.data.name
    if data == "mnist":
        write_mnist(tmp_path / "data" / "MNIST" / "raw")
    elif data.startswith("cifar"):
        write_cifar(tmp_path / "data", data, monkeypatch, rows_per_file=2)
    elif data == "folder":
        write_pictures(tmp_path / "data")
    elif data == "text":
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "some.txt").write_text("All work and no play makes Jack a dull boy.\n" * 100)
    arguments = [f"--recipe={name}", "--epochs=1", *SMALL.get(data, ())]
    if given.training.batch_size > 128:
        arguments.append("--batch-size=32")
    if given.model.pretrained:
        arguments.append(f"--pretrained={weights(tmp_path / 'weights.pth', given.model.name)}")
    code = run(parse_options(arguments, {}), {}, Signals())
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith(f"{given.model.name} (")
    assert re.search(r"^weights sha256 [0-9a-f]{16}$", out, re.M)


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_says_what_it_is_and_where_its_number_comes_from(name: str) -> None:
    recipe = yaml.safe_load(files(recipes).joinpath(f"{name}.yaml").read_text())
    assert recipe["about"].endswith(".") or "http" in recipe["about"]
    assert "expect" not in recipe or (recipe["expect"]["accuracy"] > 0 and recipe["expect"]["source"])
    options = parse_options([f"--recipe={name}"], {})
    assert name.startswith(f"{options.data.name}-")


@pytest.mark.parametrize(
    ("name", "lr", "bias_lr", "decay_per_step"),
    [
        ("cifar10-94", 0.67 * 2000 * (9 / 256) ** 2, 0.053 * 2000, 2e-6 * 2000),
        ("cifar10-96", 9 / (1 + 1 / 0.15), 64 * 9 / (1 + 1 / 0.15), 0.012 / (1 + 1 / 0.15)),
    ],
)
def test_a_speed_run_learns_at_the_published_rates(name: str, lr: float, bias_lr: float, decay_per_step: float) -> None:
    model = nn.Sequential(Conv(1, 9), nn.Linear(9, 2))
    options = parse_options([f"--recipe={name}"], {}).optimizer
    rates = {
        weight: (options.lr * group.get("lr_scale", 1.0), group["weight_decay"])
        for group in build_optimizer(model, options).param_groups
        for weight in group["params"]
    }
    for weight, expected in ((model[1].weight, lr), (model[1].bias, bias_lr)):
        rate, decay = rates[weight]
        assert rate == pytest.approx(expected, rel=1e-14)
        assert rate * decay == pytest.approx(decay_per_step, rel=1e-14)


def test_every_data_set_has_one() -> None:
    assert set(RECIPES.values()) <= set(recipe_names())
    assert all(parse_options([f"--recipe={recipe}"], {}).data.name == data for data, recipe in RECIPES.items())


def test_what_is_given_goes_before_the_recipe() -> None:
    options = parse_options(["--recipe=cifar10-resnet18-strong", "--lr=0.2", "--no-test-flip"], {})
    assert (options.optimizer.lr, options.optimizer.schedule, options.training.test_flip) == (0.2, "cosine", False)
    assert options.optimizer.warmup == 5.0


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        pytest.param("mine.yaml", None, id="missing"),
        pytest.param("mine.yaml", "options: {epoch: 3}", id="unknown-option"),
        pytest.param("cifar", None, id="unknown-name"),
    ],
)
def test_a_wrong_recipe_is_refused(
    recipe: str, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("mine.yaml").write_text(text)
    with refused(SystemExit, code=2):
        parse_options([f"--recipe={recipe}"], {})
    facts = (", ".join(recipe_names()), "--recipe") if recipe == "cifar" else ()
    assert_names(capsys.readouterr().err, recipe, "--help", *facts)
