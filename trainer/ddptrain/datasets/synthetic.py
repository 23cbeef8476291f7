# ruff: noqa: N806 - tensors carry their shape in their name
"""Images made from the seed: each class has a pattern, each image hides it in noise. To try a machine, not a model."""

import torch

from ddptrain.datasets.dataset import Augmentation, DataSet, Samples
from ddptrain.errors import TrainError
from ddptrain.options.data import DataOptions
from ddptrain.room import free_bytes, told_size
from ddpwire.exits import Exit

PART = 1 << 22  # pixels that are made at a time: while they are, each takes 32 bytes
LABEL_BYTES = 16  # of a sample, while they are made
_CPU = torch.device("cpu")


def load(options: DataOptions, seed: int) -> DataSet:
    """The data set, the same on every machine: it is made of integers. The test part is an eighth as large.

    Raises TrainError where it does not fit into the memory.
    """
    generator = torch.Generator().manual_seed(seed)
    classes = options.synthetic_classes
    channels, height, width = options.synthetic_shape
    shape = (height, width, channels)
    num_train, num_test = options.synthetic_samples, max(options.synthetic_samples // 8, 1)
    _check_room(options, num_images=num_train + num_test)
    patterns = torch.randint(64, 192, (classes, *shape), generator=generator)

    def samples(count: int) -> Samples:
        labels_N = torch.arange(count) % classes
        images_NHWC = torch.empty((count, *shape), dtype=torch.uint8)
        size = max(1, PART // (channels * height * width))
        for part, labels in zip(torch.split(images_NHWC, size), torch.split(labels_N, size), strict=True):
            noise = torch.randint(-128, 129, part.shape, generator=generator)
            part.copy_((patterns[labels] + noise).clamp(0, 255))
        return Samples(images_NHWC=images_NHWC, labels_N=labels_N)

    train, test = samples(num_train), samples(num_test)
    return DataSet(name="synthetic", classes=classes, augmentation=Augmentation(), train=train, test=test)


def _check_room(options: DataOptions, *, num_images: int) -> None:
    channels, height, width = options.synthetic_shape
    pixels = channels * height * width
    classes = options.synthetic_classes
    needed, free = num_images * (pixels + LABEL_BYTES) + 8 * classes * pixels, free_bytes(_CPU)
    if needed > free:
        raise TrainError(
            Exit.CONFIG,
            f"--synthetic-samples {options.synthetic_samples}: with an eighth as many to test, of "
            f"{channels}x{height}x{width} and {classes} classes, they need {told_size(needed)} of memory, and "
            f"{told_size(free)} are free: give fewer or smaller ones",
        )
