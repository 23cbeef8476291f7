# ruff: noqa: N806 - tensors carry their shape in their name
"""The data sets, keyed by name: digits, MNIST, CIFAR, a folder of images, synthetic images, a text.

To add a data set, write a function that loads it, and add a line to SOURCES and a recipe to ``ddptrain/recipes``.
"""

import contextlib
import errno
import gzip
import importlib.util
import io
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddptrain.config import DataOptions
from ddptrain.data import image_folder
from ddptrain.data.base import (
    ImageDataset,
    Samples,
    connect_timeout,
    format_bytes,
    free_bytes,
    torchvision_module,
)
from ddptrain.data.sampling import sample_hash
from ddptrain.data.text import TextDataset, load_text
from ddptrain.errors import TrainError, config_error
from ddpwire.exits import Exit

NUM_TEST_DIGITS = 360
_CANNOT_WRITE = (errno.EACCES, errno.EEXIST, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS)
PIXELS_AT_ONCE = 1 << 22  # pixels that are computed at a time; each needs 32 bytes of temporary memory
LABEL_BYTES = 16  # per sample, while the labels are computed
_CPU = torch.device("cpu")


def load_digits(_options: DataOptions, _seed: int) -> ImageDataset:
    """Load 1,797 handwritten digits of 8x8 pixels from the file in scikit-learn's package. Raises TrainError.

    scikit-learn is not imported, because that would take 0.9 s. Source: E. Alpaydin, C. Kaynak, Optical Recognition of
    Handwritten Digits, UCI 1998, https://doi.org/10.24432/C50P49.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise _digits_missing()
    return read_digits(Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz"))


def read_digits(path: Path) -> ImageDataset:
    """Read a digits.csv.gz. Each line has 64 grey values from 0 to 16, then the digit. Raises TrainError."""
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            rows = torch.from_numpy(np.array([line.split(",") for line in file], dtype=np.uint8))
        images_NHWC = rows[:, :64].reshape(-1, 8, 8, 1)
        labels_N = rows[:, 64].long()
    except FileNotFoundError:
        raise _digits_missing() from None
    except (OSError, EOFError, zlib.error, ValueError, IndexError, RuntimeError) as error:
        raise TrainError(Exit.DATA, f"{path} is corrupt ({error})", hint="install scikit-learn again") from None
    shuffled = sample_hash(torch.arange(len(rows)), seed=0, epoch=0).argsort(stable=True)
    test, train = shuffled[:NUM_TEST_DIGITS], shuffled[NUM_TEST_DIGITS:]
    return ImageDataset(
        name="digits",
        classes=10,
        shift_px=1,
        train=Samples(images_NHWC=images_NHWC[train], labels_N=labels_N[train]),
        test=Samples(images_NHWC=images_NHWC[test], labels_N=labels_N[test]),
    )


def _digits_missing() -> TrainError:
    return TrainError(
        Exit.NO_INPUT, "data set digits is part of scikit-learn, which is not installed: pip install scikit-learn"
    )


MNIST_FOLDER = Path("MNIST", "raw")  # as in torchvision
MNIST_FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


def _reader(name: str) -> Any:
    return getattr(torchvision_module("datasets"), name.upper())


def prepare_torchvision(options: DataOptions) -> None:
    """Download or unpack a data set of torchvision if files are missing. Raises TrainError."""
    folder, reader, name = options.folder, _reader(options.name), options.name
    if options.name == "mnist":
        unpacked = [folder / MNIST_FOLDER / name for name in MNIST_FILES]
        archives = [path.with_name(f"{path.name}.gz") for path in unpacked]
    else:
        unpacked, archives = [folder / reader.base_folder], [folder / reader.filename]
    output = io.StringIO()  # for the progress bar, and an error for each mirror
    try:
        with connect_timeout(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            reader(str(folder), download=True)
    except Exception as error:
        place, files = archives[0].parent, ", ".join(path.name for path in archives)
        if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
            raise TrainError(Exit.CANNOT_WRITE, f"{name} cannot be written to {place}: {error.strerror}") from error
        if any(all(path.exists() for path in files_there) for files_there in (archives, unpacked)):
            message, hint = f"{name} in {place} is corrupt", f"delete it, and download {files} again"
            raise TrainError(Exit.DATA, message, hint=hint) from error
        message = f"{name} is not in {place} and cannot be downloaded from here: copy {files} to this folder"
        raise TrainError(Exit.NO_INPUT, message) from error


def load_torchvision(options: DataOptions, _seed: int) -> ImageDataset:
    """Load MNIST (70,000 digits of 28x28 pixels) or CIFAR (60,000 photographs of 32x32 pixels). Raises TrainError."""
    reader, is_grey = _reader(options.name), options.name == "mnist"
    folder = options.folder / (MNIST_FOLDER if is_grey else reader.base_folder)

    def samples(*, train: bool) -> Samples:
        try:
            part = reader(str(options.folder), train=train)
        except (OSError, EOFError, ValueError, AssertionError, RuntimeError, LookupError, pickle.PickleError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TrainError(Exit.DATA, f"{options.name} in {folder} is corrupt: {reason}") from error
        images = torch.as_tensor(part.data)
        labels_N = torch.as_tensor(part.targets).long()
        return Samples(images_NHWC=images[..., None] if is_grey else images, labels_N=labels_N)

    return ImageDataset(
        name=options.name,
        classes=100 if options.name == "cifar100" else 10,
        shift_px=0 if is_grey else 4,
        flip=not is_grey,
        train=samples(train=True),
        test=samples(train=False),
    )


def load_synthetic(options: DataOptions, seed: int) -> ImageDataset:
    """Return images that are computed from the seed. They are for tests of a machine.

    An image is the pattern of its class plus noise. The test set is one eighth as large as the training set. The images
    are the same on every machine, because they are computed with integers. Raises TrainError if they do not fit into
    memory.
    """
    generator = torch.Generator().manual_seed(seed)
    classes = options.synthetic_classes
    channels, height, width = options.synthetic_shape
    shape = (height, width, channels)
    num_train, num_test = options.synthetic_samples, max(options.synthetic_samples // 8, 1)
    pixels = channels * height * width
    needed, free = (num_train + num_test) * (pixels + LABEL_BYTES) + 8 * classes * pixels, free_bytes(_CPU)
    if needed > free:
        message = (
            f"{num_train + num_test:,} images of {channels}x{height}x{width} need {format_bytes(needed)} of memory"
        )
        hint = "use a smaller --synthetic-samples or --synthetic-shape"
        raise config_error(f"{message}, but only {format_bytes(free)} are free", hint=hint)
    patterns = torch.randint(64, 192, (classes, *shape), generator=generator)

    def samples(count: int) -> Samples:
        labels_N = torch.arange(count) % classes
        images_NHWC = torch.empty((count, *shape), dtype=torch.uint8)
        size = max(1, PIXELS_AT_ONCE // pixels)
        for part, labels in zip(torch.split(images_NHWC, size), torch.split(labels_N, size), strict=True):
            noise = torch.randint(-128, 129, part.shape, generator=generator)
            part.copy_((patterns[labels] + noise).clamp(0, 255))
        return Samples(images_NHWC=images_NHWC, labels_N=labels_N)

    train, test = samples(num_train), samples(num_test)
    return ImageDataset(name="synthetic", classes=classes, train=train, test=test)


@dataclass(frozen=True, kw_only=True)
class DatasetSource:
    """The two functions that load a data set. Both raise TrainError."""

    load: Callable[[DataOptions, int], ImageDataset | TextDataset]  # (options, seed); the seed is for synthetic images
    prepare: Callable[[DataOptions], None] | None = None  # before ``load``, once per node: downloads or decodes files


SOURCES = {
    "digits": DatasetSource(load=load_digits),
    "mnist": DatasetSource(load=load_torchvision, prepare=prepare_torchvision),
    "cifar10": DatasetSource(load=load_torchvision, prepare=prepare_torchvision),
    "cifar100": DatasetSource(load=load_torchvision, prepare=prepare_torchvision),
    "folder": DatasetSource(load=image_folder.load_image_folder, prepare=image_folder.prepare_image_folder),
    "synthetic": DatasetSource(load=load_synthetic),
    "text": DatasetSource(load=load_text),
}
