"""The data sets by name. A new one is a file with ``load`` and a line here."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddptrain.datasets import cifar10, digits, mnist, synthetic
from ddptrain.datasets.dataset import DataSet
from ddptrain.options.data import DataOptions


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a data set comes from. Both raise TrainError."""

    load: Callable[[DataOptions, int], DataSet]  # the seed is that of synthetic images
    download: Callable[[Path], None] | None = None  # makes sure that the files are in the folder


SOURCES = {
    "digits": Source(load=digits.load),
    "mnist": Source(load=mnist.load, download=mnist.download),
    "cifar10": Source(load=cifar10.load, download=cifar10.download),
    "synthetic": Source(load=synthetic.load),
}
