# ruff: noqa: N803 - tensors carry their shape in their name
"""Any classifier of torchvision by its name, for images of any number of channels."""

import difflib
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ddptrain.errors import TrainError
from ddptrain.models.shape import ImageShape
from ddptrain.options.model import MODELS
from ddpwire.exits import Exit

PREFIX = "torchvision:"
_TWO_HEADS = ("googlenet", "inception_v3")


class ThreeChannels(nn.Module):
    """Grey images as a colour model sees them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """The model's logits."""
        logits: Tensor = self.model(images_BCHW.expand(-1, 3, -1, -1))
        return logits


def torchvision_models() -> Any:
    """torchvision.models, imported where it is needed: it takes seconds. Raises TrainError."""
    try:
        import torchvision.models
    except ImportError:
        raise TrainError(Exit.NO_INPUT, "torchvision, which has it, is missing: pip install 'ddpctl[train]'") from None
    return torchvision.models


def torchvision_name(name: str) -> str:
    """What torchvision calls a model of --model. Raises TrainError for what it has not."""
    models = torchvision_models()
    plain = name.removeprefix(PREFIX)
    known = models.list_models(module=models)
    if plain not in known:
        near = difflib.get_close_matches(plain, sorted({*MODELS, *known}), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"ours: {', '.join(MODELS)}"
        raise TrainError(Exit.CONFIG, f"--model {name} is none of ours and no classifier of torchvision: {hint}")
    return plain


def build(name: str, shape: ImageShape, *, small_stem: bool) -> nn.Module:
    """The model, freshly initialised. Raises TrainError."""
    plain = torchvision_name(name)
    how: dict[str, Any] = {"num_classes": shape.classes}
    if plain in _TWO_HEADS:
        how |= {"aux_logits": False, "init_weights": True}
    if plain.startswith("vit_"):
        how["image_size"] = shape.size_px
    if shape.channels not in (1, 3):
        raise TrainError(Exit.CONFIG, f"--model {name} sees 1 or 3 channels, these images have {shape.channels}")
    get = torchvision_models().get_model
    try:
        with torch.device("meta"):
            trial = _with_stem(get(plain, weights=None, **how), name, small=small_stem)
            trial.eval()(torch.empty(1, 3, shape.size_px, shape.size_px))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it fails"
        raise TrainError(Exit.CONFIG, f"--model {name} cannot take images of {shape.size_px} px: {reason}") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on how some initialise themselves
        model = _with_stem(get(plain, weights=None, **how), name, small=small_stem)
    return model if shape.channels == 3 else ThreeChannels(model)


def _with_stem(model: nn.Module, name: str, *, small: bool) -> nn.Module:
    """For small images: a 3x3 convolution and no pool, where the model is a ResNet. Raises TrainError."""
    if small:
        old = getattr(model, "conv1", None)
        if not isinstance(old, nn.Conv2d) or not hasattr(model, "maxpool"):
            raise TrainError(Exit.CONFIG, f"--stem small is for ResNets, not for {name}")
        model.conv1 = nn.Conv2d(old.in_channels, old.out_channels, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model
