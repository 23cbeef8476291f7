import pytest
import torch

from ddptrain.errors import TrainError
from ddptrain.models import ImageShape, build_model
from ddptrain.recipes import MODELS, RECIPES

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
    images = torch.rand(1, shape.channels, shape.size_px, shape.size_px)
    logits = build_model(name, shape)(images)  # in training, with a single image: what a last batch may leave a rank
    assert logits.shape == (1, shape.classes)


def test_resnet18_is_named_as_torchvision_names_it() -> None:
    ours = build_model("resnet18", ImageShape(channels=3, size_px=224, classes=1000)).state_dict()
    assert len(ours) == 122
    assert list(ours)[:3] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    assert ours["layer2.0.downsample.0.weight"].shape == (128, 64, 1, 1)
    assert ours["fc.weight"].shape == (1000, 512)


def test_images_too_small_are_refused_in_one_line() -> None:
    with pytest.raises(TrainError) as error:
        build_model("resnet18", DIGITS)
    assert (error.value.code, error.value.message) == (
        78,
        "--model resnet18 needs images of at least 16 px, these have 8; "
        "models that fit: simple, convnet, imageclassifier, digitsnet",
    )


def test_recipes_name_models_that_are_there() -> None:
    assert {recipe.model for recipe in RECIPES.values()} <= set(MODELS)
    for name in MODELS:
        build_model(name, MNIST)
