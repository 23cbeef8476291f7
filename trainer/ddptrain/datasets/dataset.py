# ruff: noqa: N815 - tensors carry their shape in their name
"""A data set as the trainer wants it: as bytes, in tensors. Shapes: N samples, H height, W width, C channels."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ddptrain.errors import TrainError
from ddptrain.models.shape import ImageShape
from ddpwire.exits import Exit


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How training images may be changed without changing what they show."""

    shift_px: int = 0
    flip: bool = False


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Images and what they show. A large set's images may be a file's pages, read as they are touched."""

    images_NHWC: Tensor  # uint8
    labels_N: Tensor  # int64
    file: Path | None = None  # the .npy file that the images are the pages of

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def num_bytes(self) -> int:
        """Of the images."""
        return self.images_NHWC.numel()


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Images to learn from and images held out. They may be larger than ``crop_px``, what a model sees of them."""

    name: str
    classes: int
    augmentation: Augmentation
    train: Samples
    test: Samples
    crop_px: int | None = None
    class_names: tuple[str, ...] = field(default=(), repr=False)

    @property
    def shape(self) -> ImageShape:
        """What a model must know."""
        _, size_px, _, channels = self.train.images_NHWC.shape
        return ImageShape(channels=channels, size_px=self.crop_px or size_px, classes=self.classes)

    def checked(self) -> "DataSet":
        """Itself, if images and labels fit together. Raises TrainError."""
        for samples in (self.train, self.test):
            labels, images = samples.labels_N, samples.images_NHWC
            if not len(labels) or len(labels) != len(images):
                raise TrainError(Exit.DATA, f"{self.name} is corrupt: {len(images)} images, {len(labels)} labels")
            if labels.min() < 0 or labels.max() >= self.classes:
                wrong = f"labels from {int(labels.min())} to {int(labels.max())}, not from 0 to {self.classes - 1}"
                raise TrainError(Exit.DATA, f"{self.name} is corrupt: {wrong}")
        return self
