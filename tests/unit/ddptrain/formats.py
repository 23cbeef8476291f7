"""Small data sets in the real formats of their files."""

import hashlib
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def write_mnist(raw: Path) -> tuple[np.ndarray, np.ndarray]:
    """IDX files (http://yann.lecun.com/exdb/mnist/): big-endian, type 8 is a byte."""
    raw.mkdir(parents=True)
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (50, 28, 28), dtype=np.uint8)
    labels = generator.integers(0, 10, 50, dtype=np.uint8)
    for part, count in (("train", 50), ("t10k", 20)):
        header = struct.pack(">BBBB3I", 0, 0, 8, 3, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images[:count].tobytes())
        header = struct.pack(">BBBBI", 0, 0, 8, 1, count)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(header + labels[:count].tobytes())
    return images, labels


def write_cifar(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, *, rows_per_file: int = 10
) -> tuple[np.ndarray, list[int]]:
    """The Python version's files (https://www.cs.toronto.edu/~kriz/cifar.html), with checksums for torchvision."""
    from torchvision.datasets import CIFAR10, CIFAR100

    fine = name == "cifar100"
    reader = CIFAR100 if fine else CIFAR10
    base = folder / reader.base_folder
    base.mkdir(parents=True)
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 256, (rows_per_file, 3072), dtype=np.uint8)
    labels = [int(label) for label in generator.integers(0, 100 if fine else 10, rows_per_file)]

    def write(file: str, content: dict[str, object]) -> list[str]:
        (base / file).write_bytes(pickle.dumps(content, protocol=2))
        return [file, hashlib.md5((base / file).read_bytes()).hexdigest()]  # noqa: S324 - torchvision's choice

    batch = {"data": rows, "fine_labels" if fine else "labels": labels}
    train, test, meta = ("train", "test", "meta") if fine else (None, "test_batch", "batches.meta")
    files = [train] if train else [f"data_batch_{number}" for number in range(1, 6)]
    key = "fine_label_names" if fine else "label_names"
    monkeypatch.setattr(reader, "train_list", [write(file, batch) for file in files])
    monkeypatch.setattr(reader, "test_list", [write(test, batch)])
    filename, md5 = write(meta, {key: [f"class {number}" for number in range(100 if fine else 10)]})
    monkeypatch.setattr(reader, "meta", {"filename": filename, "key": key, "md5": md5})
    return rows, labels


def write_pictures(folder: Path, *, classes: int = 3, each: int = 8, size: tuple[int, int] = (40, 30)) -> None:
    """PNG and JPEG pictures, each class with a colour of its own."""
    for number in range(classes):
        (folder / f"class{number}").mkdir(parents=True)
        for index in range(each):
            colour = (80 * number, 255 - 80 * number, 10 * index)
            ending = "png" if index % 2 else "jpg"
            Image.new("RGB", size, colour).save(folder / f"class{number}" / f"{index}.{ending}")
