# ruff: noqa: N803, N806 - tensors carry their shape in their name
"""Rectangles in images: what cutout and erasing blank, and cutmix pastes."""

import torch
from torch import Tensor

from ddptrain.input import draws

ERASE_AREA = (0.02, 0.33)  # share of the image, and how long the sides are to each other: Z. Zhong et al. 2017,
ERASE_RATIO = (0.3, 3.3)  # https://arxiv.org/abs/1708.04896


def inside(top_B: Tensor, left_B: Tensor, bottom_B: Tensor, right_B: Tensor, size_px: int) -> Tensor:
    """Which pixels lie in each one's rectangle: bool of shape (B, 1, H, W). It may reach out of the image."""
    at = torch.arange(size_px, device=top_B.device)
    rows_BH = (at >= top_B[:, None]) & (at < bottom_B[:, None])
    columns_BW = (at >= left_B[:, None]) & (at < right_B[:, None])
    return (rows_BH[:, :, None] & columns_BW[:, None, :])[:, None]


def around(middle_B: Tensor, side_B: Tensor | int) -> tuple[Tensor, Tensor]:
    """The two ends of a side around a pixel."""
    start_B = middle_B - side_B // 2
    return start_B, start_B + side_B


def cutout(bits_B: Tensor, side_px: int, size_px: int) -> Tensor:
    """A square around a pixel drawn from all (T. DeVries, G. Taylor 2017, https://arxiv.org/abs/1708.04552)."""
    top, bottom = around((draws.uniform(bits_B, draws.CUT_TOP) * size_px).long(), side_px)
    left, right = around((draws.uniform(bits_B, draws.CUT_LEFT) * size_px).long(), side_px)
    return inside(top, left, bottom, right, size_px)


def erased(bits_B: Tensor, share: float, size_px: int) -> Tensor:
    """A rectangle wholly inside the image, in that share of the images."""
    low, high = ERASE_AREA
    area = (low + (high - low) * draws.uniform(bits_B, draws.ERASE_AREA)) * size_px**2
    first, last = (torch.tensor(ratio).log().item() for ratio in ERASE_RATIO)
    ratio = (first + (last - first) * draws.uniform(bits_B, draws.ERASE_SHAPE)).exp()
    height = (area * ratio).sqrt().round().clamp(1, size_px).long()
    width = (area / ratio).sqrt().round().clamp(1, size_px).long()
    top = (draws.uniform(bits_B, draws.ERASE_TOP) * (size_px - height + 1)).long()
    left = (draws.uniform(bits_B, draws.ERASE_LEFT) * (size_px - width + 1)).long()
    chosen = draws.uniform(bits_B, draws.ERASE) < share
    return inside(top, left, top + height * chosen, left + width * chosen, size_px)
