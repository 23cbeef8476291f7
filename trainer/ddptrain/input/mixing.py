# ruff: noqa: N803, N806 - tensors carry their shape in their name
"""Mixup and cutmix: each image with another one of the whole data set, whichever rank that one's batch is on.

H. Zhang et al. 2017, https://arxiv.org/abs/1710.09412; S. Yun et al. 2019, https://arxiv.org/abs/1905.04899.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddptrain.input import boxes, draws
from ddptrain.stream import rehash


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """How images are mixed. A table is None where that way is not asked for; one of them is there."""

    mixup: Tensor | None  # of draws.beta
    cutmix: Tensor | None


def mixing(mixup: float, cutmix: float, device: torch.device) -> Mixing | None:
    """By Beta(mixup, mixup) and Beta(cutmix, cutmix); 0: not this way. None: not at all."""
    tables = [draws.beta_table(alpha).to(device) if alpha else None for alpha in (mixup, cutmix)]
    return Mixing(mixup=tables[0], cutmix=tables[1]) if mixup or cutmix else None


def partners(bits_B: Tensor, num_samples: int) -> Tensor:
    """The sample that each is mixed with."""
    return rehash(bits_B, draws.PARTNER) % num_samples


def mix(how: Mixing, images_BCHW: Tensor, others_BCHW: Tensor, bits_B: Tensor) -> tuple[Tensor, Tensor]:
    """The mixed images, and how much of each one's label is its own, float32."""
    size_px = images_BCHW.shape[2]
    pasted_B = _pasted(how, bits_B)
    own_B = torch.ones(len(bits_B), device=bits_B.device)
    keep = torch.ones((), device=bits_B.device)
    if how.mixup is not None:
        own_B = torch.where(pasted_B, own_B, draws.beta(draws.uniform(bits_B, draws.BLEND), how.mixup))
        keep = own_B[:, None, None, None]
    if how.cutmix is not None:
        wanted_B = 1 - draws.beta(draws.uniform(bits_B, draws.PASTE), how.cutmix)  # of the image is pasted over
        side_B = (wanted_B.sqrt() * size_px).long() * pasted_B
        top, bottom = boxes.around((draws.uniform(bits_B, draws.PASTE_TOP) * size_px).long(), side_B)
        left, right = boxes.around((draws.uniform(bits_B, draws.PASTE_LEFT) * size_px).long(), side_B)
        box = boxes.inside(top, left, bottom, right, size_px)
        own_B = torch.where(pasted_B, 1 - box.float().mean((1, 2, 3)), own_B)
        keep = torch.where(box, 0.0, keep)
    return torch.lerp(others_BCHW, images_BCHW, keep.to(images_BCHW.dtype)), own_B


def _pasted(how: Mixing, bits_B: Tensor) -> Tensor:
    """Which images cutmix takes; the others mixup."""
    if how.mixup is None or how.cutmix is None:
        return torch.full_like(bits_B, how.mixup is None, dtype=torch.bool)
    return draws.uniform(bits_B, draws.WHICH) < 0.5
