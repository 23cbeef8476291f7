# ruff: noqa: N803, N815 - tensors carry their shape in their name
"""A data set as the trainer wants it: whole, as bytes, in tensors. Shapes: N samples, C channels, H height, W width."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddptrain.errors import TrainError
from ddptrain.models import ImageShape
from ddpwire.exits import Exit


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How training images may be changed without changing what they show."""

    shift_px: int = 0
    flip: bool = False


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Images and what they show."""

    images_NCHW: Tensor  # uint8
    labels_N: Tensor  # int64

    def __len__(self) -> int:
        return len(self.labels_N)

    def to(self, device: torch.device) -> "Samples":
        """The same on another device."""
        return Samples(images_NCHW=self.images_NCHW.to(device), labels_N=self.labels_N.to(device))


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Images to learn from and images held out."""

    name: str
    classes: int
    augmentation: Augmentation
    train: Samples
    test: Samples

    @property
    def shape(self) -> ImageShape:
        """What a model must know."""
        _, channels, size_px, _ = self.train.images_NCHW.shape
        return ImageShape(channels=channels, size_px=size_px, classes=self.classes)

    def checked(self) -> "DataSet":
        """Itself, if images and labels fit together. Raises TrainError."""
        for samples in (self.train, self.test):
            labels, images = samples.labels_N, samples.images_NCHW
            if not len(labels) or len(labels) != len(images):
                raise TrainError(Exit.DATA, f"{self.name} is corrupt: {len(images)} images, {len(labels)} labels")
            if labels.min() < 0 or labels.max() >= self.classes:
                wrong = f"labels from {int(labels.min())} to {int(labels.max())}, not from 0 to {self.classes - 1}"
                raise TrainError(Exit.DATA, f"{self.name} is corrupt: {wrong}")
        return self


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """Makes bytes into numbers of mean 0 and deviation 1 over the training images. Both of shape (1, C, 1, 1)."""

    mean: Tensor
    deviation: Tensor

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        """The images as floats."""
        return (images_BCHW - self.mean) / self.deviation


def normalisation(images_NCHW: Tensor, device: torch.device) -> Normalisation:
    """That of uint8 images on the CPU. Counted in integers: every rank gets the same numbers to the last bit."""
    values = torch.arange(256)
    counts = torch.stack([torch.bincount(plane.flatten(), minlength=256) for plane in images_NCHW.unbind(1)])
    total, sums, squares = counts.sum(1), (counts * values).sum(1), (counts * values**2).sum(1)
    mean = sums / total
    deviation = (squares / total - mean**2).clamp(min=1e-3).sqrt()  # a channel of one colour has none
    shape = (1, -1, 1, 1)
    return Normalisation(mean=mean.float().view(shape).to(device), deviation=deviation.float().view(shape).to(device))
