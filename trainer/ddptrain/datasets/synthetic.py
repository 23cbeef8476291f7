# ruff: noqa: N806 - tensors carry their shape in their name
"""Images made from the seed: each class has a pattern, each image hides it in noise. To try a machine, not a model."""

import torch

from ddptrain.datasets.dataset import Augmentation, DataSet, Samples
from ddptrain.options.data import DataOptions


def load(options: DataOptions, seed: int) -> DataSet:
    """The data set, the same on every machine: it is made of integers. The test part is an eighth as large."""
    generator = torch.Generator().manual_seed(seed)
    classes = options.synthetic_classes
    channels, height, width = options.synthetic_shape
    shape = (height, width, channels)
    patterns = torch.randint(64, 192, (classes, *shape), generator=generator)

    def samples(count: int) -> Samples:
        labels_N = torch.arange(count) % classes
        noise = torch.randint(-128, 129, (count, *shape), generator=generator)
        return Samples(images_NHWC=(patterns[labels_N] + noise).clamp(0, 255).to(torch.uint8), labels_N=labels_N)

    train = samples(options.synthetic_samples)
    test = samples(max(options.synthetic_samples // 8, 1))
    return DataSet(name="synthetic", classes=classes, augmentation=Augmentation(), train=train, test=test)
