import sys
from pathlib import Path

import pytest
import torch
from tests.facts import assert_names

from ddptrain import models
from ddptrain.config import MODELS, ModelOptions
from ddptrain.data.base import ImageShape
from ddptrain.errors import TrainError
from ddptrain.models import build_model
from ddptrain.training_state import enable_recompute

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
    for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_images_too_small_are_refused_in_one_line() -> None:
    with pytest.raises(TrainError) as error:
        build_model("resnet18", DIGITS)
    assert error.value.code == 78
    assert_names(error.value, "--model", "16", "8")


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
    ("name", "shape"),
    [
        pytest.param("torchvision:resnet81", CIFAR, id="misspelt"),
        pytest.param("qq", CIFAR, id="unknown"),
        pytest.param("resnet50", ImageShape(channels=4, size_px=32, classes=2), id="channels"),
    ],
)
def test_a_model_that_does_not_exist_or_fit_is_refused(name: str, shape: ImageShape) -> None:
    with pytest.raises(TrainError) as error:
        build_model(name, shape)
    assert error.value.code == 78
    assert_names(error.value, "--model")


def test_images_too_small_for_torchvisions() -> None:
    with pytest.raises(TrainError) as error:
        build_model("alexnet", DIGITS)
    assert error.value.code == 78
    assert_names(str(error.value).partition(": ")[0], "--model", "8")
    assert "\n" not in str(error.value)


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
