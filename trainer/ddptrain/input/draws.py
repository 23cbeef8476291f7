# ruff: noqa: N803 - tensors carry their shape in their name
"""What is drawn for each sample of an epoch: functions of its 63 random bits, the same on every device."""

import torch
from torch import Tensor

from ddptrain.stream import rehash

# Numbers of further draws; what uses one names it here, so that no two are the same.
PARTNER, WHICH, BLEND, PASTE, PASTE_TOP, PASTE_LEFT = 1, 2, 3, 4, 5, 6
CUT_TOP, CUT_LEFT, ERASE, ERASE_AREA, ERASE_SHAPE, ERASE_TOP, ERASE_LEFT = 7, 8, 9, 10, 11, 12, 13
_TABLE = 4096


def offset(bits_B: Tensor, choices: int) -> tuple[Tensor, Tensor]:
    """Where a crop begins: its top and its left, each from 0 to under ``choices``."""
    return (bits_B & 0xFFFFF) % choices, ((bits_B >> 20) & 0xFFFFF) % choices


def mirrored(bits_B: Tensor) -> Tensor:
    """1 for about half of them, else 0."""
    return (bits_B >> 60) & 1


def uniform(bits_B: Tensor, number: int) -> Tensor:
    """From 0 to under 1, float32."""
    return (rehash(bits_B, number) >> 39).float() / (1 << 24)


def beta_table(alpha: float) -> Tensor:
    """The quantiles of Beta(alpha, alpha) up to its median, at even steps of probability.

    Integrated over s = x^alpha, in which the density has no pole at 0.
    """
    s = torch.linspace(0, 0.5**alpha, 64 * _TABLE, dtype=torch.float64)
    x = s ** (1 / alpha)
    area = torch.cumulative_trapezoid((1 - x) ** (alpha - 1), s)
    probability = torch.cat([torch.zeros(1, dtype=torch.float64), area / area[-1]])
    wanted = torch.linspace(0, 1, _TABLE + 1, dtype=torch.float64)
    return x[torch.searchsorted(probability, wanted).clamp(max=len(x) - 1)].float()


def beta(uniform_B: Tensor, table: Tensor) -> Tensor:
    """Beta(alpha, alpha), from 0 to 1: the distribution is symmetric."""
    upper = uniform_B >= 0.5
    folded = torch.where(upper, 1 - uniform_B, uniform_B) * 2
    low = table[(folded * _TABLE).long().clamp(max=_TABLE)]
    return torch.where(upper, 1 - low, low)
