# ruff: noqa: N806 - tensors carry their shape in their name
"""Real handwritten digits without a network: 1,797 images of 8x8 that scikit-learn's package holds as a file.

Read without importing scikit-learn, which takes 0.9 s for a file of 57 kB. E. Alpaydin, C. Kaynak, Optical Recognition
of Handwritten Digits, UCI 1998, https://doi.org/10.24432/C50P49.
"""

import gzip
import importlib.util
import zlib
from pathlib import Path

import numpy as np
import torch

from ddptrain.datasets.dataset import Augmentation, DataSet, Samples
from ddptrain.errors import TrainError
from ddptrain.options.data import DataOptions
from ddptrain.stream import sample_hash
from ddpwire.exits import Exit

NUM_TEST = 360


def load(_options: DataOptions, _seed: int) -> DataSet:
    """The data set, split the same way whatever the seed. Raises TrainError."""
    return read(_file())


def read(path: Path) -> DataSet:
    """The data set in a digits.csv.gz: a line an image, 64 greys from 0 to 16 and the digit. Raises TrainError."""
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            rows = torch.from_numpy(np.array([line.split(",") for line in file], dtype=np.uint8))
        images_NHWC = rows[:, :64].reshape(-1, 8, 8, 1)
        labels_N = rows[:, 64].long()
    except FileNotFoundError:
        raise _missing() from None
    except (OSError, EOFError, zlib.error, ValueError, IndexError, RuntimeError) as error:
        raise TrainError(Exit.DATA, f"{path} is corrupt ({error}): install scikit-learn again") from None
    shuffled = sample_hash(torch.arange(len(rows)), seed=0, epoch=0).argsort(stable=True)
    test, train = shuffled[:NUM_TEST], shuffled[NUM_TEST:]
    return DataSet(
        name="digits",
        classes=10,
        augmentation=Augmentation(shift_px=1),
        train=Samples(images_NHWC=images_NHWC[train], labels_N=labels_N[train]),
        test=Samples(images_NHWC=images_NHWC[test], labels_N=labels_N[test]),
    ).checked()


def _file() -> Path:
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise _missing()
    return Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")


def _missing() -> TrainError:
    return TrainError(
        Exit.NO_INPUT, "the digits are in scikit-learn's package, which is not installed: pip install 'ddpctl[digits]'"
    )
