"""The models, pretrained weights, recomputed activations, and the operations of a step."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.messages import assert_names, refused
from torch import nn

from ddptrain import models
from ddptrain.config import MODELS, ModelOptions
from ddptrain.data.base import ImageShape
from ddptrain.errors import TrainError
from ddptrain.models import SMALLEST_PX, build_model
from ddptrain.training_state import enable_recompute, sample_flops

MNIST = ImageShape(channels=1, size_px=28, classes=10)
CIFAR = ImageShape(channels=3, size_px=32, classes=10)
DIGITS = ImageShape(channels=1, size_px=8, classes=10)


@pytest.mark.parametrize(
    ("name", "shape", "num_parameters"),
    [
        ("simple", MNIST, 101_770),
        ("convnet", MNIST, 29_034),
        ("imageclassifier", CIFAR, 5_851_338),
        ("resnet18", CIFAR, 11_173_962),
        ("resnet18", ImageShape(channels=3, size_px=224, classes=1000), 11_689_512),
        ("digitsnet", DIGITS, 39_250),
    ],
)
def test_parameters(name: str, shape: ImageShape, num_parameters: int) -> None:
    assert sum(parameter.numel() for parameter in build_model(name, shape).parameters()) == num_parameters


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [MNIST, CIFAR, ImageShape(channels=2, size_px=16, classes=3)])
def test_every_model_runs_on_every_shape_it_fits(name: str, shape: ImageShape) -> None:
    shape = replace(shape, size_px=max(shape.size_px, SMALLEST_PX[name]))
    images = torch.rand(1, shape.channels, shape.size_px, shape.size_px)
    logits = build_model(name, shape)(images)  # in training, with a single image: what a last batch may leave a rank
    assert logits.shape == (1, shape.classes)


@pytest.mark.parametrize(
    "name", ["torchvision:resnet18", "mobilenet_v3_small", "vit_b_16", "googlenet", "regnet_x_400mf"]
)
@pytest.mark.parametrize(("channels", "size_px"), [(1, 32), (3, 64)])
def test_torchvisions_by_name(name: str, channels: int, size_px: int) -> None:
    shape = ImageShape(channels=channels, size_px=size_px, classes=7)
    model = build_model(name, shape).eval()
    assert model(torch.rand(1, channels, size_px, size_px)).shape == (1, 7)
    with torch.device("meta"):  # as for a sharded training
        assert {tensor.device.type for tensor in build_model(name, shape).state_dict().values()} == {"meta"}


@pytest.mark.parametrize(
    ("name", "shape", "facts"),
    [
        pytest.param("torchvision:resnet81", CIFAR, (), id="misspelt"),
        pytest.param("qq", CIFAR, (), id="unknown"),
        pytest.param("resnet50", ImageShape(channels=4, size_px=32, classes=2), (), id="channels"),
        pytest.param("resnet18", DIGITS, ("16", "8"), id="too-small"),
    ],
)
def test_a_model_that_does_not_exist_or_fit_is_refused(name: str, shape: ImageShape, facts: tuple[str, ...]) -> None:
    with refused(TrainError, "--model", *facts, code=78):
        build_model(name, shape)


def saved(model: torch.nn.Module, path: Path, **around: object) -> Path:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save({**around, "model": state} if around else state, path)
    return path


def test_pretrained_weights_from_a_file_and_a_new_head(tmp_path: Path) -> None:
    imagenet = ImageShape(channels=3, size_px=224, classes=1000)
    given = build_model("torchvision:resnet18", imagenet)
    path = saved(given, tmp_path / "resnet18.pth")
    options = ModelOptions(name="resnet18", pretrained=str(path))
    model = build_model("resnet18", CIFAR, stem="imagenet")
    models.fetch_pretrained(options)
    assert models.load_pretrained(model, options) == ("fc",)
    theirs, ours = given.state_dict(), model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if not name.startswith("fc."))
    assert ours["fc.weight"].shape == (10, 512)
    assert models.load_pretrained(build_model("resnet18", CIFAR), options) == ("conv1", "fc")  # another stem
    saved(given, path, epoch=90)  # a checkpoint around it
    grey = build_model("torchvision:resnet18", MNIST)
    assert models.load_pretrained(grey, options) == ("fc",)


@pytest.mark.usefixtures("no_network")
def test_weights_that_cannot_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(TrainError) as error:
        models.fetch_pretrained(ModelOptions(name="resnet18", pretrained="imagenet"))
    where = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    assert error.value.code == 66
    assert str(where) in str(error.value)
    assert_names(error.value, "//download.pytorch.org/models/resnet18-f37072fd.pth", "--pretrained")
    where.write_bytes(b"put there by hand")
    models.fetch_pretrained(ModelOptions(name="resnet18", pretrained="imagenet"))


def test_recomputed_activations_change_neither_gradients_nor_statistics() -> None:
    torch.manual_seed(0)
    plain, again = (build_model("resnet18", CIFAR) for _ in range(2))
    again.load_state_dict(plain.state_dict())
    enable_recompute(again)
    images, labels = torch.rand(4, 3, 32, 32), torch.tensor([1, 2, 3, 4])
    for model in (plain, again):
        torch.nn.functional.cross_entropy(model(images), labels).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), again.buffers(), strict=True))
    assert int(again.bn1.num_batches_tracked) == 1


def test_products_and_convolutions_are_counted_and_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16 * 16, 10)
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    convolution = 2 * (3 * 3 * 3) * 8 * 16 * 16
    linear = 2 * (8 * 16 * 16) * 10
    assert sample_flops(model, torch.zeros(1, 3, 16, 16)) == 3 * (convolution + linear)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
