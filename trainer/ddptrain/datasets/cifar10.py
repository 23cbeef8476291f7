# ruff: noqa: N806 - tensors carry their shape in their name
"""CIFAR-10: 60,000 photographs of 32x32 in ten classes, read and downloaded by torchvision."""

from pathlib import Path

import torch

from ddptrain.datasets.dataset import Augmentation, DataSet, Samples
from ddptrain.datasets.fetching import fetch, read, torchvision_datasets
from ddptrain.options.data import DataOptions


def download(data_dir: Path) -> None:
    """Make sure that the files are there. Raises TrainError."""
    cifar10 = torchvision_datasets().CIFAR10
    fetch(
        "cifar10",
        archives=(data_dir / cifar10.filename,),
        unpacked=(data_dir / cifar10.base_folder,),
        get=lambda: cifar10(str(data_dir), download=True),
    )


def load(options: DataOptions, _seed: int) -> DataSet:
    """The data set. Raises TrainError."""
    return DataSet(
        name="cifar10",
        classes=10,
        augmentation=Augmentation(shift_px=4, flip=True),
        train=_samples(options.folder, train=True),
        test=_samples(options.folder, train=False),
    ).checked()


def _samples(data_dir: Path, *, train: bool) -> Samples:
    cifar10 = torchvision_datasets().CIFAR10
    part = read("cifar10", data_dir / cifar10.base_folder, lambda: cifar10(str(data_dir), train=train))
    images_NCHW = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()
    return Samples(images_NCHW=images_NCHW, labels_N=torch.tensor(part.targets))
