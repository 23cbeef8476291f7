# ruff: noqa: N803, N806 - tensors carry their shape in their name
"""Training images, changed a little: a whole batch at a time, each by the hash of its sample.

Shapes: B batch, C channels, H height, W width.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ddptrain.datasets.dataset import Augmentation


def augment(images_BCHW: Tensor, hash_B: Tensor, how: Augmentation) -> Tensor:
    """The images shifted by up to ``how.shift_px`` each way, black coming in, and half of them mirrored."""
    if how.shift_px:
        images_BCHW = _shifted(images_BCHW, hash_B, how.shift_px)
    if how.flip:
        mirrored_B = (hash_B >> 60) & 1
        images_BCHW = torch.where(mirrored_B.bool()[:, None, None, None], images_BCHW.flip(3), images_BCHW)
    return images_BCHW


def _shifted(images_BCHW: Tensor, hash_B: Tensor, shift_px: int) -> Tensor:
    """A crop of the padded image, as torchvision's RandomCrop with padding."""
    count, _, height, width = images_BCHW.shape
    device = images_BCHW.device
    padded = functional.pad(images_BCHW, (shift_px,) * 4)
    choices = 2 * shift_px + 1
    top_B, left_B = (hash_B & 0xFFFFF) % choices, ((hash_B >> 20) & 0xFFFFF) % choices
    rows_BH = top_B[:, None] + torch.arange(height, device=device)
    columns_BW = left_B[:, None] + torch.arange(width, device=device)
    image_B = torch.arange(count, device=device)
    crops_BHWC = padded.permute(0, 2, 3, 1)[image_B[:, None, None], rows_BH[:, :, None], columns_BW[:, None, :]]
    return crops_BHWC.permute(0, 3, 1, 2).contiguous()
