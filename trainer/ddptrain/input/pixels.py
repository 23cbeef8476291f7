# ruff: noqa: N803, N806, N815 - tensors carry their shape in their name
"""Images as bytes, laid out so that a batch of shifted and mirrored crops is one gather.

Padded once; mirrored images are kept beside them where there is room, so that a flip is another index.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Squares of which a model sees crops of ``crop_px``."""

    squares_MHWC: Tensor  # M is N, or 2 N with each image's mirror image N further on
    num_images: int
    crop_px: int

    @property
    def choices(self) -> int:
        """Places for a crop, each way."""
        return self.squares_MHWC.shape[1] - self.crop_px + 1

    def crops(self, index_B: Tensor, top_B: Tensor, left_B: Tensor, mirrored_B: Tensor | None) -> Tensor:
        """Of the shape (B, crop_px, crop_px, C)."""
        kept = len(self.squares_MHWC) > self.num_images
        if mirrored_B is not None and kept:
            index_B = index_B + self.num_images * mirrored_B
            left_B = torch.where(mirrored_B.bool(), self.choices - 1 - left_B, left_B)
        size, channels = self.crop_px, self.squares_MHWC.shape[3]
        image, row, pixel, _ = self.squares_MHWC.stride()
        corners = self.squares_MHWC.as_strided(
            (len(self.squares_MHWC), self.choices, self.choices, size, size * channels), (image, row, pixel, row, 1)
        )
        crops_BHWC = corners[index_B, top_B, left_B].view(len(index_B), size, size, channels)
        if mirrored_B is not None and not kept:
            crops_BHWC = torch.where(mirrored_B.bool()[:, None, None, None], crops_BHWC.flip(2), crops_BHWC)
        return crops_BHWC

    def middles(self, index_B: Tensor) -> Tensor:
        """The crops in the middle, which is the whole image unless it is larger than a crop."""
        middle_B = torch.full_like(index_B, (self.choices - 1) // 2)
        return self.crops(index_B, middle_B, middle_B, None)


def lay_out(images_NHWC: Tensor, *, crop_px: int, shift_px: int, mirrored: bool) -> Pixels:
    """Images as Pixels; without padding and mirror images, no byte is copied."""
    squares = images_NHWC
    if shift_px:
        squares = functional.pad(squares, (0, 0, shift_px, shift_px, shift_px, shift_px))
    if mirrored:
        squares = torch.cat([squares, squares.flip(2)])
    return Pixels(squares_MHWC=squares.contiguous(), num_images=len(images_NHWC), crop_px=crop_px)


def bytes_laid_out(images_NHWC: Tensor, *, shift_px: int, mirrored: bool) -> int:
    """What ``lay_out`` takes."""
    num, height, width, channels = images_NHWC.shape
    return num * (height + 2 * shift_px) * (width + 2 * shift_px) * channels * (2 if mirrored else 1)
