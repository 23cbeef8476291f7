# ruff: noqa: N806 - tensors carry their shape in their name
"""CIFAR-10 and CIFAR-100: 60,000 photographs of 32x32 in ten or a hundred classes, read by torchvision."""

from pathlib import Path
from typing import Any

import torch

from ddptrain.datasets.dataset import Augmentation, DataSet, Samples
from ddptrain.datasets.fetching import fetch, read, torchvision_datasets
from ddptrain.options.data import DataOptions

_CLASSES = {"cifar10": 10, "cifar100": 100}


def _reader(name: str) -> Any:
    datasets = torchvision_datasets()
    return datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100


def prepare(options: DataOptions) -> None:
    """Make sure that the files are there. Raises TrainError."""
    name, folder, reader = options.name, options.folder, _reader(options.name)
    fetch(
        name,
        archives=(folder / reader.filename,),
        unpacked=(folder / reader.base_folder,),
        get=lambda: reader(str(folder), download=True),
    )


def load(options: DataOptions, _seed: int) -> DataSet:
    """The data set. Raises TrainError."""
    return DataSet(
        name=options.name,
        classes=_CLASSES[options.name],
        augmentation=Augmentation(shift_px=4, flip=True),
        train=_samples(options.name, options.folder, train=True),
        test=_samples(options.name, options.folder, train=False),
    ).checked()


def _samples(name: str, folder: Path, *, train: bool) -> Samples:
    reader = _reader(name)
    part = read(name, folder / reader.base_folder, lambda: reader(str(folder), train=train))
    images_NHWC = torch.from_numpy(part.data)
    return Samples(images_NHWC=images_NHWC, labels_N=torch.tensor(part.targets))
