"""The models by name: ours, and any classifier of torchvision."""

from dataclasses import dataclass

from torch import nn

from ddptrain.errors import TrainError
from ddptrain.models import tutorials, zoo
from ddptrain.models.resnet import Norm, ResNet18
from ddptrain.models.shape import ImageShape
from ddptrain.options.model import MODELS
from ddpwire.exits import Exit

__all__ = ["ImageShape", "build_model"]

GROUPS = 8
SMALL_PX = 64  # up to here ImageNet's stem leaves too little for the layers above it
# The smallest image that one of ours makes sense of: its poolings leave at least a pixel, and its batch norms more
# than one value a channel even where a rank has a single image.
SMALLEST_PX = {"simple": 1, "convnet": 4, "imageclassifier": 8, "resnet18": 16, "digitsnet": 2}
_NORMED = ("convnet", "resnet18")


@dataclass(frozen=True, kw_only=True)
class _Choice:
    norm: Norm
    small_stem: bool


def build_model(name: str, shape: ImageShape, *, stem: str = "auto", norm: str = "batch") -> nn.Module:
    """The model, freshly initialised. Raises TrainError when it is none, or the images are too small for it."""
    if norm == "group" and name not in _NORMED:
        raise TrainError(Exit.CONFIG, f"--norm group is for {' and '.join(_NORMED)}, not for {name}: leave it out")
    if name not in MODELS:
        return zoo.build(name, shape, small_stem=stem == "small")
    smallest_px = SMALLEST_PX[name]
    if shape.size_px < smallest_px:
        fits = ", ".join(other for other, smallest in SMALLEST_PX.items() if smallest <= shape.size_px)
        raise TrainError(
            Exit.CONFIG,
            f"--model {name} needs images of at least {smallest_px} px, these have {shape.size_px}; "
            f"models that fit: {fits}",
        )
    small_stem = stem == "small" or (stem == "auto" and shape.size_px <= SMALL_PX)
    return _ours(name, shape, _Choice(norm=_group_norm if norm == "group" else nn.BatchNorm2d, small_stem=small_stem))


def _ours(name: str, shape: ImageShape, choice: _Choice) -> nn.Module:
    if name == "resnet18":
        return ResNet18(shape, norm=choice.norm, small_stem=choice.small_stem)
    if name == "convnet":
        return tutorials.convnet(shape, choice.norm)
    build = {
        "simple": tutorials.simple_model,
        "imageclassifier": tutorials.image_classifier,
        "digitsnet": tutorials.digitsnet,
    }
    return build[name](shape)


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(GROUPS, channels)
