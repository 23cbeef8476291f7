# ruff: noqa: N803, N806 - tensors carry their shape in their name
"""Models against those that they are named after, and what does not go with them."""

import sys
from pathlib import Path

import pytest
import torch
from tests.messages import assert_names
from tests.unit.ddptrain.test_models import CIFAR, DIGITS, MNIST, saved
from torch import nn

from ddptrain import models
from ddptrain.config import ModelOptions
from ddptrain.data.base import ImageShape
from ddptrain.errors import TrainError
from ddptrain.models import build_model
from ddptrain.training_state import sample_flops


def test_resnet18_is_named_as_torchvision_names_it() -> None:
    ours = build_model("resnet18", ImageShape(channels=3, size_px=224, classes=1000)).state_dict()
    assert len(ours) == 122
    assert list(ours)[:3] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    assert ours["layer2.0.downsample.0.weight"].shape == (128, 64, 1, 1)
    assert ours["fc.weight"].shape == (1000, 512)


@pytest.mark.parametrize(("name", "shape"), [("convnet", MNIST), ("imageclassifier", CIFAR)])
def test_the_tutorials_own_give_the_same_numbers_and_gradients(name: str, shape: ImageShape) -> None:
    sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
    try:
        import tutorials
    finally:
        sys.path.pop(0)
    theirs = tutorials.Setting(model=name, shape=shape, batch_size=4, augmented=False).new_model().double()
    ours = build_model(name, shape).double()
    own = list(ours.state_dict())
    ours.load_state_dict(dict(zip(own, theirs.state_dict().values(), strict=True)))
    images = torch.rand(4, shape.channels, shape.size_px, shape.size_px, dtype=torch.float64)
    for model in (theirs, ours):
        torch.nn.functional.cross_entropy(model(images), torch.arange(4)).backward()
    for parameter, other in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["resnet18", "convnet"])
def test_group_norm_sees_an_image_alone(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, CIFAR, norm="group").train()
    images = torch.rand(4, 3, 32, 32)
    assert torch.allclose(model(images)[:1], model(images[:1]), atol=1e-5)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())


def test_a_norm_for_a_model_without_one_is_refused() -> None:
    with pytest.raises(TrainError) as error:
        build_model("simple", MNIST, norm="group")
    assert error.value.code == 78
    assert_names(error.value, "--norm")


def test_the_stem_is_as_asked() -> None:
    shape = ImageShape(channels=3, size_px=128, classes=10)
    kernels = {
        stem: build_model("resnet18", shape, stem=stem).conv1.kernel_size for stem in ("auto", "small", "imagenet")
    }
    assert kernels == {"auto": (7, 7), "small": (3, 3), "imagenet": (7, 7)}
    theirs = build_model("torchvision:resnet18", CIFAR, stem="small")
    assert theirs(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    assert (theirs.conv1.kernel_size, type(theirs.maxpool)) == ((3, 3), torch.nn.Identity)
    with pytest.raises(TrainError) as error:
        build_model("torchvision:squeezenet1_1", CIFAR, stem="small")
    assert error.value.code == 78
    assert_names(error.value, "--stem")


def test_images_too_small_for_torchvisions() -> None:
    with pytest.raises(TrainError) as error:
        build_model("alexnet", DIGITS)
    assert error.value.code == 78
    assert_names(str(error.value).partition(": ")[0], "--model", "8")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "code"), [("none", 66), ("torn", 65), ("text", 65), ("other", 65)])
def test_a_file_without_pretrained_weights_is_refused(name: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "torn.pth").write_bytes(b"torn")
    torch.save({"epoch": 3}, tmp_path / "text.pth")
    saved(build_model("convnet", CIFAR), tmp_path / "other.pth")
    options = ModelOptions(name="resnet18", pretrained=str(tmp_path / f"{name}.pth"))

    def load() -> None:
        models.fetch_pretrained(options)
        models.load_pretrained(build_model("resnet18", CIFAR), options)

    with pytest.raises(TrainError) as error:
        load()
    assert error.value.code == code
    assert_names(error.value, "--pretrained")


def test_attention_is_counted() -> None:
    class Attention(nn.Module):
        def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
            tokens_BHSD = images_BCHW.reshape(1, 2, 8, 16)
            return nn.functional.scaled_dot_product_attention(tokens_BHSD, tokens_BHSD, tokens_BHSD)

    scores = values = 2 * (2 * 8 * 8 * 16)
    assert sample_flops(Attention(), torch.zeros(1, 4, 8, 8)) == 3 * (scores + values)


def test_a_model_that_takes_no_single_image_is_not_counted() -> None:
    class Choosy(nn.Module):
        def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
            raise ValueError(f"a batch of {len(images_BCHW)}")

    assert sample_flops(Choosy(), torch.zeros(1, 3, 8, 8)) == 0
