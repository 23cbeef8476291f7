"""The data sets by name. A new one is a file with ``load`` and a line here."""

from collections.abc import Callable
from dataclasses import dataclass

from ddptrain.datasets import cifar, digits, folder, mnist, synthetic
from ddptrain.datasets.dataset import DataSet
from ddptrain.options.data import DataOptions


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a data set comes from. Both raise TrainError."""

    load: Callable[[DataOptions, int], DataSet]  # the seed is that of synthetic images
    prepare: Callable[[DataOptions], None] | None = None  # once a node: makes sure that the files are there


SOURCES = {
    "digits": Source(load=digits.load),
    "mnist": Source(load=mnist.load, prepare=mnist.prepare),
    "cifar10": Source(load=cifar.load, prepare=cifar.prepare),
    "cifar100": Source(load=cifar.load, prepare=cifar.prepare),
    "folder": Source(load=folder.load, prepare=folder.prepare),
    "synthetic": Source(load=synthetic.load),
}
