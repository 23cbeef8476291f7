# ruff: noqa: N815 - tensors carry their shape in their name
"""A data set: uint8 images and labels in tensors, for training and for testing. Also the free memory of a device.

Shapes: N samples, H height, W width, C channels.
"""

import contextlib
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddptrain.errors import TrainError
from ddpwire.exits import Exit
from ddpwire.machine import cgroups

CONNECT_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ImageShape:
    """The shape of the square images of a data set, and the number of its classes."""

    channels: int
    size_px: int
    classes: int


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Images and labels. The images may be mapped into memory from a file."""

    images_NHWC: Tensor  # uint8
    labels_N: Tensor  # int64
    file: Path | None = None  # the mapped .npy file, if any

    def __len__(self) -> int:
        return len(self.labels_N)


@dataclass(frozen=True, kw_only=True)
class ImageDataset:
    """A training set and a test set. A model gets complete images if ``crop_px`` is None, else crops of this size."""

    name: str
    classes: int
    train: Samples
    test: Samples
    shift_px: int = 0  # the defaults of --shift and --flip
    flip: bool = False
    crop_px: int | None = None
    noun = "images"  # the plural name of a sample

    @property
    def shape(self) -> ImageShape:
        """The shape of the images that a model gets."""
        _, size_px, _, channels = self.train.images_NHWC.shape
        return ImageShape(channels=channels, size_px=self.crop_px or size_px, classes=self.classes)

    def __post_init__(self) -> None:
        """Raise TrainError unless the images and labels are consistent."""
        for samples in (self.train, self.test):
            labels, images = samples.labels_N, samples.images_NHWC
            if not len(labels) or len(labels) != len(images):
                raise TrainError(Exit.DATA, f"{self.name} is corrupt: {len(images)} images, {len(labels)} labels")
            if labels.min() < 0 or labels.max() >= self.classes:
                wrong = f"labels from {int(labels.min())} to {int(labels.max())}, not from 0 to {self.classes - 1}"
                raise TrainError(Exit.DATA, f"{self.name} is corrupt: {wrong}")


def torchvision_module(part: str) -> Any:
    """Return torchvision.datasets or torchvision.models. The import takes several seconds. Raises TrainError."""
    try:
        return import_module(f"torchvision.{part}")
    except ImportError:
        message = "this data set or model needs torchvision, which is not installed: pip install torchvision"
        raise TrainError(Exit.NO_INPUT, message) from None


@contextlib.contextmanager
def connect_timeout() -> Iterator[None]:
    """Limit the time to connect to a server to CONNECT_TIMEOUT_S. torchvision's own limit is minutes."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(CONNECT_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def free_bytes(device: torch.device) -> float:
    """Return the free bytes of a GPU or, for a CPU, of the machine or of its cgroup, whichever has less."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return float("inf")  # not Linux
    for folder in cgroups("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
                most, now = (float((folder / name).read_text()) for name in (limit, used))
                cached = re.search(r"^(?:total_)?inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.M)
                free = min(free, most - now + (float(cached[1]) if cached else 0.0))
    return free


def format_bytes(num_bytes: float) -> str:
    """Return a size with its unit, for messages."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:,.1f} GB"
