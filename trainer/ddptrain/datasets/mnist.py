"""MNIST: 70,000 handwritten digits of 28x28, read and downloaded by torchvision."""

from pathlib import Path

from ddptrain.datasets.dataset import Augmentation, DataSet, Samples
from ddptrain.datasets.fetching import fetch, read, torchvision_datasets
from ddptrain.options.data import DataOptions

FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


def prepare(options: DataOptions) -> None:
    """Make sure that the files are there. Raises TrainError."""
    datasets = torchvision_datasets()
    raw = options.folder / "MNIST" / "raw"
    fetch(
        "mnist",
        archives=tuple(raw / f"{name}.gz" for name in FILES),
        unpacked=tuple(raw / name for name in FILES),
        get=lambda: datasets.MNIST(str(options.folder), download=True),
    )


def load(options: DataOptions, _seed: int) -> DataSet:
    """The data set. Raises TrainError."""
    return DataSet(
        name="mnist",
        classes=10,
        augmentation=Augmentation(),
        train=_samples(options.folder, train=True),
        test=_samples(options.folder, train=False),
    ).checked()


def _samples(data_dir: Path, *, train: bool) -> Samples:
    datasets = torchvision_datasets()
    part = read("mnist", data_dir / "MNIST" / "raw", lambda: datasets.MNIST(str(data_dir), train=train))
    return Samples(images_NHWC=part.data[..., None], labels_N=part.targets.long())
