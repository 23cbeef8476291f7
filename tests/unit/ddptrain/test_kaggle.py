"""Data sets are found under a Kaggle session's input, in the layouts of the data sets that people use there."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from tests.unit.ddptrain.formats import write_cifar, write_pictures

from ddptrain.config import DataOptions
from ddptrain.data.datasets import SOURCES
from ddptrain.data.kaggle import locate


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    monkeypatch.setenv("DDP_KAGGLE_INPUT", str(tmp_path / "input"))
    (tmp_path / "input").mkdir()
    return tmp_path / "input"


def loaded(name: str) -> list[tuple[int, ...]]:
    options = locate(DataOptions(name=name, image_size=16), os.environ)
    source = SOURCES[name]
    if source.prepare:
        source.prepare(options)
    data = source.load(options, 0)
    return [tuple(data.train.images_NHWC.shape), tuple(data.test.images_NHWC.shape)]


@pytest.mark.parametrize("layout", ["cifar10-python/cifar-10-batches-py", "datasets/ann/cifar-10", "deep/down/there"])
def test_cifar(layout: str, top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path / "made", "cifar10", monkeypatch)
    shutil.copytree(tmp_path / "made" / "cifar-10-batches-py", top / layout)
    write_pictures(top / "pictures")  # another input
    assert loaded("cifar10") == [(50, 32, 32, 3), (10, 32, 32, 3)]
    assert loaded("cifar10") == [(50, 32, 32, 3), (10, 32, 32, 3)]  # the links are there already
