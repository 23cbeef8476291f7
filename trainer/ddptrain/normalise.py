# ruff: noqa: N803 - tensors carry their shape in their name
"""Bytes into the numbers that a model sees. Shapes: N samples, B batch, H height, W width, C channels."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

MOST_COUNTED = 100_000_000  # bytes that are looked at: a larger set's mean is taken from a part of it
SHORT_ROW = 64  # numbers
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # what torchvision's weights were trained with


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """Mean 0 and deviation 1 over the training images: bytes times ``scale`` plus ``offset``.

    Both of shape (C, 1, 1).
    """

    scale: Tensor
    offset: Tensor
    _repeated: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)  # by pixels at once

    def __call__(self, images_BHWC: Tensor) -> Tensor:
        """Numbers of shape (B, C, H, W), their channels together in memory, in the type of ``scale``."""
        batch, height, width, channels = images_BHWC.shape
        # Whole rows at a time, or whole images: a row of (C,) is too short for vector instructions (measured: 6 to 10
        # times slower), one of 28 grey pixels too (4 times).
        at_once = width if width * channels >= SHORT_ROW else height * width
        if at_once not in self._repeated:
            self._repeated[at_once] = self.scale.view(-1).repeat(at_once), self.offset.view(-1).repeat(at_once)
        scale, offset = self._repeated[at_once]
        rows = images_BHWC.reshape(batch, -1, at_once * channels).to(self.scale.dtype)
        return torch.addcmul(offset, rows, scale).view(batch, height, width, channels).permute(0, 3, 1, 2)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Normalisation":
        """The same, there and in that type."""
        return Normalisation(scale=self.scale.to(device, dtype), offset=self.offset.to(device, dtype))


def of_images(images_NHWC: Tensor) -> Normalisation:
    """That of uint8 images. Counted in integers: every rank gets the same numbers to the last bit."""
    per_image = images_NHWC[0].numel()
    counted = images_NHWC[:: max(1, len(images_NHWC) * per_image // MOST_COUNTED)]
    values = torch.arange(256)
    counts = torch.stack([torch.bincount(plane.flatten(), minlength=256) for plane in counted.unbind(3)])
    total, sums, squares = counts.sum(1), (counts * values).sum(1), (counts * values**2).sum(1)
    mean = sums / total
    deviation = (squares / total - mean**2).clamp(min=1e-3).sqrt()  # a channel of one colour has none
    return Normalisation(scale=(1 / deviation).view(-1, 1, 1), offset=(-mean / deviation).view(-1, 1, 1))


def of_imagenet(channels: int) -> Normalisation:
    """That of ImageNet; of its mean colour for grey images."""
    mean, deviation = (torch.tensor(values) for values in IMAGENET)
    if channels == 1:
        mean, deviation = mean.mean().view(1), deviation.mean().view(1)
    return Normalisation(scale=(1 / (255 * deviation)).view(-1, 1, 1), offset=(-mean / deviation).view(-1, 1, 1))
