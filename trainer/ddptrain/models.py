# ruff: noqa: N803 - tensors carry their shape in their name
"""The models: ddptrain's own models and torchvision's classifiers. Also loads pretrained weights.

Shapes: B batch, C channels, H height, W width.
"""

import difflib
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ddptrain.cifarnet import CifarNet
from ddptrain.config import MODELS, TEXT_MODEL, ModelOptions
from ddptrain.data.base import ImageShape, connect_timeout, torchvision_module
from ddptrain.errors import TrainError, config_error, os_errors
from ddptrain.gpt import GPT
from ddpwire import locks
from ddpwire.exits import Exit

Norm = Callable[[int], nn.Module]
NORM_GROUPS = 8
SMALL_PX = 64  # up to this size ImageNet's stem leaves too few pixels for the layers above it

# The smallest image of each of ddptrain's models: its poolings leave at least one pixel, and its batch norms see more
# than one value per channel even if a rank has a single image.
SMALLEST_PX = dict(zip(MODELS, (1, 4, 8, 16, 2, 17, 17), strict=True))
_NORMED = ("convnet", "resnet18")
TORCHVISION_PREFIX = "torchvision:"
IMAGENET = "imagenet"


def build_model(name: str, shape: ImageShape, *, stem: str = "auto", norm: str = "batch") -> nn.Module:
    """Return the named model with initial weights. Raises TrainError if it is unknown or the images are too small."""
    if norm == "group" and name not in _NORMED:
        raise config_error(f"--norm group is for {' and '.join(_NORMED)}, not for {name}", hint="leave it out")
    if name == TEXT_MODEL:
        raise config_error("--model gpt is for --data text, not for images", hint="give another model")
    if name not in MODELS:
        return build_torchvision_model(name, shape, small_stem=stem == "small")
    smallest_px = SMALLEST_PX[name]
    if shape.size_px < smallest_px:
        fits = ", ".join(other for other, smallest in SMALLEST_PX.items() if smallest <= shape.size_px)
        message = f"--model {name} needs images of at least {smallest_px} px, but these have {shape.size_px}"
        raise config_error(f"{message}; models that fit: {fits}")
    norm_layer: Norm = partial(nn.GroupNorm, NORM_GROUPS) if norm == "group" else nn.BatchNorm2d
    if name == "resnet18":
        small_stem = stem == "small" or (stem == "auto" and shape.size_px <= SMALL_PX)
        return resnet18(shape, norm_layer, small_stem=small_stem)
    if name == "convnet":
        return convnet(shape, norm_layer)
    if name.startswith("cifarnet"):
        return CifarNet(shape, deep=name == "cifarnet-deep")
    build = {"simple": simple_model, "imageclassifier": image_classifier, "digitsnet": digitsnet}
    return build[name](shape)


def build_gpt(options: ModelOptions, *, context: int) -> GPT:
    """Return the model for ``--data text`` with initial weights. Raises TrainError."""
    if options.name != TEXT_MODEL:
        raise config_error(f"--model {options.name} is for images, not for --data text", hint="give gpt")
    if options.width % options.heads:
        raise config_error(f"--width {options.width} is not divisible by --heads {options.heads}")
    return GPT(layers=options.layers, width=options.width, heads=options.heads, context=context)


def blocks_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the layers that are sharded one by one: those with parameters in one of the model's nn.Sequentials."""
    children = [child for part in model.children() if isinstance(part, nn.Sequential) for child in part.children()]
    return tuple(child for child in children if any(True for _ in child.parameters()))


class Mean(nn.Module):
    """The mean over height and width, whose backward pass is deterministic on CUDA, unlike AdaptiveAvgPool2d(1)."""

    def forward(self, features_BCHW: Tensor) -> Tensor:
        """Return the means, of shape (B, C)."""
        return features_BCHW.mean((2, 3))


def resnet18(shape: ImageShape, norm: Norm, *, small_stem: bool) -> nn.Module:
    """Return torchvision's ResNet-18 (He et al. 2015, https://arxiv.org/abs/1512.03385) for any number of channels.

    With ImageNet's stem, the layers would shrink an image of 32x32 pixels to 1x1.
    """
    model: Any = torchvision_module("models").resnet18(num_classes=shape.classes, norm_layer=norm)
    if small_stem:
        use_small_stem(model, shape.channels)
    else:
        model.conv1 = nn.Conv2d(shape.channels, 64, 7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.avgpool = Mean()
    return cast(nn.Module, model)


def use_small_stem(model: nn.Module, channels: int) -> None:
    """Replace the stem of a ResNet of torchvision by one 3x3 convolution, which keeps the size of the image."""
    model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()


def simple_model(shape: ImageShape) -> nn.Module:
    """Return SimpleModel, the multilayer perceptron of the MNIST tutorials."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(shape.channels * shape.size_px**2, 128), nn.ReLU(), nn.Linear(128, shape.classes)
    )


def _pool_relu() -> tuple[nn.Module, nn.Module]:
    """Return MaxPool2d(2), then ReLU. The opposite order computes the same, but takes longer."""
    return nn.MaxPool2d(2), nn.ReLU(inplace=True)


def convnet(shape: ImageShape, norm: Norm) -> nn.Module:
    """Return ConvNet: two convolutions, from https://yangkky.github.io/2019/07/08/distributed-pytorch-tutorial.html."""

    def layer(inputs: int, outputs: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, kernel_size=5, padding=2)
        return nn.Sequential(convolution, norm(outputs), *_pool_relu())

    head = nn.Linear(32 * (shape.size_px // 4) ** 2, shape.classes)
    return nn.Sequential(layer(shape.channels, 16), layer(16, 32), nn.Flatten(), head)


def image_classifier(shape: ImageShape) -> nn.Module:
    """Return ImageClassifier, the six convolutions of the CIFAR-10 tutorials."""

    def block(inputs: int, middle: int, outputs: int) -> nn.Module:
        first, second = nn.Conv2d(inputs, middle, 3, padding=1), nn.Conv2d(middle, outputs, 3, padding=1)
        return nn.Sequential(first, nn.ReLU(inplace=True), second, *_pool_relu())

    return nn.Sequential(
        block(shape.channels, 32, 64),
        block(64, 128, 128),
        block(128, 256, 256),
        nn.Flatten(),
        nn.Linear(256 * (shape.size_px // 8) ** 2, 1024),
        nn.ReLU(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, shape.classes),
    )


def digitsnet(shape: ImageShape) -> nn.Module:
    """Return DigitsNet, three convolutions for the 8x8 digits. Its GroupNorm needs no statistics of other ranks."""

    def layer(inputs: int, outputs: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.GroupNorm(4, outputs), nn.ReLU())

    head = nn.Linear(48 * (shape.size_px // 2) ** 2, shape.classes)
    return nn.Sequential(layer(shape.channels, 24), layer(24, 48), nn.MaxPool2d(2), layer(48, 48), nn.Flatten(), head)


class ThreeChannels(nn.Module):
    """Applies a model for colour images to grey images, by repeating their channel three times."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return the model's logits."""
        return cast(Tensor, self.model(images_BCHW.expand(-1, 3, -1, -1)))


def torchvision_name(name: str) -> str:
    """Return torchvision's name for a model. Raises TrainError for an unknown model."""
    models = torchvision_module("models")
    plain = name.removeprefix(TORCHVISION_PREFIX)
    known = models.list_models(module=models)
    if plain not in known:
        near = difflib.get_close_matches(plain, sorted({*MODELS, *known}), n=3, cutoff=0.5)
        similar = " or ".join(filter(None, (", ".join(near[:-1]), near[-1]))) if near else ""
        hint = f"did you mean {similar}?" if near else f"the built-in models are {', '.join(MODELS)}"
        raise config_error(f"--model {name} is neither a built-in model nor a torchvision classifier: {hint}")
    return plain


def build_torchvision_model(name: str, shape: ImageShape, *, small_stem: bool) -> nn.Module:
    """Return a torchvision classifier with initial weights, for 1 or 3 channels. Raises TrainError."""
    plain, models = torchvision_name(name), torchvision_module("models")
    options: dict[str, Any] = {"num_classes": shape.classes}
    if plain in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": True}
    if plain.startswith("vit_"):
        options["image_size"] = shape.size_px
    if shape.channels not in (1, 3):
        raise config_error(f"--model {name} takes images of 1 or 3 channels, not {shape.channels}")

    def build(device: torch.device) -> nn.Module:
        # torchvision computes the widths of a RegNet from the values of tensors, which the meta device does not have.
        with warnings.catch_warnings(), torch.device("cpu") if plain.startswith("regnet_") else device:
            warnings.simplefilter("ignore")  # some models warn about their initialisation
            model: nn.Module = models.get_model(plain, weights=None, **options)
            if small_stem:
                if not isinstance(model, models.ResNet):
                    raise config_error(f"--stem small is for ResNets, not for {name}")
                use_small_stem(model, 3)
            return model.to(device)

    try:
        build(torch.device("meta")).eval()(torch.empty(1, 3, shape.size_px, shape.size_px, device="meta"))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it fails"
        raise config_error(f"--model {name} does not work with images of {shape.size_px} px: {reason}") from None
    model = build(torch.get_default_device())
    return model if shape.channels == 3 else ThreeChannels(model)


def weights_url(options: ModelOptions) -> str:
    """Return the address of torchvision's weights. Raises TrainError."""
    return str(torchvision_module("models").get_model_weights(torchvision_name(options.name)).DEFAULT.url)


def weights_file(options: ModelOptions) -> Path:
    """Return the path of the weights. The file may not have been downloaded yet. Raises TrainError."""
    if options.pretrained != IMAGENET:
        return Path(str(options.pretrained))
    return Path(torch.hub.get_dir(), "checkpoints", weights_url(options).rsplit("/", 1)[1])


def fetch_pretrained(options: ModelOptions) -> None:
    """Download the weights unless they exist. A lock keeps runs on a node from downloading twice. Raises TrainError."""
    path = weights_file(options)
    if options.pretrained != IMAGENET:
        if not path.is_file():
            message = f"--pretrained {path} does not exist; to download weights, give --pretrained without a file"
            raise TrainError(Exit.NO_INPUT, message)
        return
    url, digest = weights_url(options), path.stem.rpartition("-")[2]  # the file's name ends with the sha256's beginning
    with os_errors(Exit.CANNOT_WRITE, f"weights cannot be written to {path.parent}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            locks.lock(lock.fileno(), Path(lock.name), wait_s=None)  # without locks, two may download: each renames
            if path.exists():
                return
            try:
                with connect_timeout():
                    torch.hub.download_url_to_file(url, str(path), hash_prefix=digest, progress=False)
            except Exception as error:
                message = f"{url} cannot be downloaded from here: save it as {path}, or give --pretrained FILE"
                raise TrainError(Exit.NO_INPUT, message) from error


def load_pretrained(model: nn.Module, options: ModelOptions) -> tuple[str, ...]:
    """Load the weights into a model. Return the names of the modules that are not loaded. Raises TrainError.

    The head is not loaded, because the weights are for other classes. A stem of another shape is not loaded either. The
    tensors of all other modules must have the same shapes as in the file.
    """
    path = weights_file(options)
    given = _read_weights(path)
    inner = model.model if isinstance(model, ThreeChannels) else model
    own = inner.state_dict()
    names = list(own)
    head, stem = names[-1].rpartition(".")[0], names[0].rpartition(".")[0]
    fresh = {head}
    if stem != head and names[0] in given and given[names[0]].shape != own[names[0]].shape:
        fresh.add(stem)
    wanted = {name: tensor for name, tensor in own.items() if name.rpartition(".")[0] not in fresh}
    needed = [name for name in wanted if name in given or not name.endswith("num_batches_tracked")]
    wrong = [name for name in needed if name not in given or given[name].shape != wanted[name].shape]
    if wrong:
        raise TrainError(
            Exit.DATA,
            f"--pretrained {path} does not fit --model {options.name}: {len(wrong)} of its {len(wanted)} tensors are "
            f"missing or have another shape, for example {wrong[0]}",
        )
    inner.load_state_dict({name: given[name] for name in wanted if name in given}, strict=False)
    return tuple(sorted(fresh))


def _read_weights(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a state_dict in a file. The state_dict may be under the key "model" or "state_dict"."""
    try:
        values: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise TrainError(Exit.NO_INPUT, f"--pretrained {path} cannot be read: {error.strerror}") from None
    except Exception:  # a broken pickle can fail in any way
        raise TrainError(Exit.DATA, f"--pretrained {path} is corrupt, or it is not a file of weights") from None
    for key in ("model", "state_dict"):
        if isinstance(values, dict) and isinstance(values.get(key), dict):
            values = values[key]
    if not isinstance(values, dict) or not values or not all(isinstance(tensor, Tensor) for tensor in values.values()):
        raise TrainError(Exit.DATA, f"--pretrained {path} contains no named weights")
    return {str(name).removeprefix("module."): tensor for name, tensor in values.items()}
