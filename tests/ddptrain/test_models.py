import sys
from pathlib import Path

import pytest
import torch

from ddptrain.errors import TrainError
from ddptrain.models import ImageShape, build_model, pretrained
from ddptrain.options.model import MODELS, ModelOptions
from ddptrain.recompute import recompute

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
    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
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
    assert (error.value.code, error.value.message) == (
        78,
        "--model resnet18 needs images of at least 16 px, these have 8; "
        "models that fit: simple, convnet, imageclassifier, digitsnet",
    )


@pytest.mark.parametrize("name", ["resnet18", "convnet"])
def test_group_norm_sees_an_image_alone(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, CIFAR, norm="group").train()
    images = torch.rand(4, 3, 32, 32)
    assert torch.allclose(model(images)[:1], model(images[:1]), atol=1e-5)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())


def test_a_norm_is_chosen_where_there_is_a_choice() -> None:
    with pytest.raises(TrainError) as error:
        build_model("simple", MNIST, norm="group")
    assert (error.value.code, error.value.message) == (
        78,
        "--norm group is for convnet and resnet18, not for simple: leave it out",
    )


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
    assert error.value.message == "--stem small is for ResNets, not for torchvision:squeezenet1_1"


@pytest.mark.parametrize("name", ["torchvision:resnet18", "mobilenet_v3_small", "vit_b_16", "googlenet"])
@pytest.mark.parametrize(("channels", "size_px"), [(1, 32), (3, 64)])
def test_torchvisions_by_name(name: str, channels: int, size_px: int) -> None:
    model = build_model(name, ImageShape(channels=channels, size_px=size_px, classes=7)).eval()
    assert model(torch.rand(1, channels, size_px, size_px)).shape == (1, 7)


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        (
            "torchvision:resnet81",
            CIFAR,
            "--model torchvision:resnet81 is none of ours and no classifier of torchvision: "
            "did you mean resnet18 or resnet152 or resnet101?",
        ),
        ("qq", CIFAR, f"--model qq is none of ours and no classifier of torchvision: ours: {', '.join(MODELS)}"),
        (
            "resnet50",
            ImageShape(channels=4, size_px=32, classes=2),
            "--model resnet50 sees 1 or 3 channels, these images have 4",
        ),
    ],
)
def test_names_that_are_none(name: str, shape: ImageShape, told: str) -> None:
    with pytest.raises(TrainError) as error:
        build_model(name, shape)
    assert (error.value.code, error.value.message) == (78, told)


def test_images_too_small_for_torchvisions() -> None:
    with pytest.raises(TrainError) as error:
        build_model("alexnet", DIGITS)
    assert error.value.code == 78
    assert error.value.message.startswith("--model alexnet cannot take images of 8 px: ")
    assert "\n" not in error.value.message


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
    pretrained.fetch(options)
    assert pretrained.load(model, options) == ("fc",)
    theirs, ours = given.state_dict(), model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if not name.startswith("fc."))
    assert ours["fc.weight"].shape == (10, 512)
    assert pretrained.load(build_model("resnet18", CIFAR), options) == ("conv1", "fc")  # another stem
    saved(given, path, epoch=90)  # a checkpoint around it
    grey = build_model("torchvision:resnet18", MNIST)
    assert pretrained.load(grey, options) == ("fc",)


def test_pretrained_weights_that_are_none(tmp_path: Path) -> None:
    def told(path: Path, name: str = "resnet18") -> tuple[int, str]:
        options = ModelOptions(name=name, pretrained=str(path))

        def load() -> None:
            pretrained.fetch(options)
            pretrained.load(build_model("resnet18", CIFAR), options)

        with pytest.raises(TrainError) as error:
            load()
        return error.value.code, error.value.message.replace(str(tmp_path), "here")

    assert told(tmp_path / "none.pth") == (
        66,
        "--pretrained here/none.pth is not there; leave the name out to download weights",
    )
    (tmp_path / "torn.pth").write_bytes(b"torn")
    assert told(tmp_path / "torn.pth") == (65, "--pretrained here/torn.pth is torn, or not a file of weights")
    torch.save({"epoch": 3}, tmp_path / "text.pth")
    assert told(tmp_path / "text.pth") == (65, "--pretrained here/text.pth holds no weights by name")
    assert told(saved(build_model("convnet", CIFAR), tmp_path / "other.pth")) == (
        65,
        "--pretrained here/other.pth does not fit --model resnet18: 100 of its 120 tensors are missing or have another "
        "shape, conv1.weight first",
    )


@pytest.mark.usefixtures("no_network")
def test_weights_that_cannot_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(TrainError) as error:
        pretrained.fetch(ModelOptions(name="resnet18", pretrained="imagenet"))
    where = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    assert (error.value.code, error.value.message) == (
        66,
        "https://download.pytorch.org/models/resnet18-f37072fd.pth cannot be downloaded from here: "
        f"put it to {where}, or give --pretrained FILE",
    )
    where.write_bytes(b"put there by hand")
    pretrained.fetch(ModelOptions(name="resnet18", pretrained="imagenet"))


def test_recomputed_activations_change_neither_gradients_nor_statistics() -> None:
    torch.manual_seed(0)
    plain, again = (build_model("resnet18", CIFAR) for _ in range(2))
    again.load_state_dict(plain.state_dict())
    recompute(again)
    images, labels = torch.rand(4, 3, 32, 32), torch.tensor([1, 2, 3, 4])
    for model in (plain, again):
        torch.nn.functional.cross_entropy(model(images), labels).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), again.buffers(), strict=True))
    assert int(again.bn1.num_batches_tracked) == 1
