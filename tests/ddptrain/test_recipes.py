"""Every recipe runs, from its YAML file to its last checkpoint, on a small data set in its real format."""

import re
from pathlib import Path

import pytest
import torch
from tests.ddptrain.formats import write_cifar, write_mnist, write_pictures

from ddptrain.main import run
from ddptrain.models import ImageShape, build_model
from ddptrain.options import parse
from ddptrain.recipes import RECIPES, read_recipe, recipe_names
from ddpwire.signals import Signals

SMALL = {"folder": ("--image-size=32",), "synthetic": ("--synthetic-samples=64",)}


def weights(path: Path, name: str) -> Path:
    size_px = 32
    model = build_model(name, ImageShape(channels=3, size_px=size_px, classes=1000), stem="imagenet")
    torch.save(model.state_dict(), path)
    return path


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = parse([f"--recipe={name}"], {})
    data = given.data.name
    if data == "mnist":
        write_mnist(tmp_path / "data" / "MNIST" / "raw")
    elif data.startswith("cifar"):
        write_cifar(tmp_path / "data", data, monkeypatch)
    elif data == "folder":
        write_pictures(tmp_path / "data")
    arguments = [f"--recipe={name}", "--epochs=1", *SMALL.get(data, ())]
    if given.training.batch_size > 128:
        arguments.append("--batch-size=32")
    if given.model.pretrained:
        arguments.append(f"--pretrained={weights(tmp_path / 'weights.pth', given.model.name)}")
    code = run(parse(arguments, {}), {}, Signals())
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith(f"{given.model.name} (")
    assert re.search(r"^weights sha256 [0-9a-f]{16}$", out, re.M)


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_says_what_it_is_and_where_its_number_comes_from(name: str) -> None:
    recipe = read_recipe(name)
    assert recipe.about.endswith(".") or "http" in recipe.about
    assert recipe.source
    assert (recipe.accuracy is None) == (recipe.source == "not measured here")
    options = parse([f"--recipe={name}"], {})
    assert name.startswith(f"{options.data.name}-")


def test_every_data_set_has_one() -> None:
    assert set(RECIPES.values()) <= set(recipe_names())
    assert all(parse([f"--recipe={recipe}"], {}).data.name == data for data, recipe in RECIPES.items())


def test_what_is_given_goes_before_the_recipe() -> None:
    options = parse(["--recipe=cifar10-resnet18-strong", "--lr=0.2", "--no-test-flip"], {})
    assert (options.optimizer.lr, options.optimizer.schedule, options.training.test_flip) == (0.2, "cosine", False)
    assert options.optimizer.warmup == 5.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "argument --recipe: mine.yaml cannot be read: No such file or directory"),
        (
            "[]",
            "argument --recipe: mine.yaml is no recipe: "
            "it may hold about, options (a mapping) and expect, and needs options",
        ),
        ("options: {epoch: 3}", "recipe mine.yaml: unrecognized arguments: --epoch=3 (did you mean --epochs?)"),
        ("options: {lr: -1}", "recipe mine.yaml: argument --lr: '-1' is not a number from 0"),
        ("options: {epochs: 3}", "recipe mine.yaml: --batch-size, --lr and --model are given nowhere"),
    ],
)
def test_a_recipe_that_is_none(
    text: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("mine.yaml").write_text(text)
    with pytest.raises(SystemExit) as left:
        parse(["--recipe=mine.yaml"], {})
    assert left.value.code == 2
    assert capsys.readouterr().err == f"ddptrain: {told}; see ddptrain --help\n"


def test_a_name_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--recipe=cifar"], {})
    told = f"argument --recipe: 'cifar' is none of {', '.join(recipe_names())}, and no .yaml file"
    assert capsys.readouterr().err == f"ddptrain: {told}; see ddptrain --help\n"
