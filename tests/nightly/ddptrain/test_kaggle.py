"""Further data sets under the input of a Kaggle session."""

import shutil
import tempfile
from pathlib import Path

import pytest
from tests.messages import assert_names
from tests.unit.ddptrain import test_datasets
from tests.unit.ddptrain.formats import write_mnist, write_pictures
from tests.unit.ddptrain.test_datasets import loaded

from ddptrain.config import DataOptions
from ddptrain.data.kaggle import locate
from ddptrain.errors import TrainError

top = test_datasets.top  # the fixture


@pytest.mark.parametrize("layout", ["{0}", "raw/{0}", "{0}/{0}", "{1}"])
def test_mnist(layout: str, top: Path, tmp_path: Path) -> None:
    write_mnist(tmp_path / "made")
    for file in (tmp_path / "made").iterdir():
        path = top / "mnist-dataset" / layout.format(file.name, file.name.replace("-idx", ".idx"))
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, path)
    assert loaded("mnist") == [(50, 28, 28, 1), (20, 28, 28, 1)]


@pytest.mark.parametrize("layout", ["flowers", "flowers/data", "datasets/ann/flowers/train"])
def test_pictures(layout: str, top: Path) -> None:
    write_pictures(top / layout, classes=2, each=10)
    if layout.endswith("train"):
        write_pictures(top / layout.replace("train", "val"), classes=2, each=3)
    before = sorted(top.rglob("*"))
    train, test = loaded("folder")
    assert (train[0] + test[0], train[1:]) == (26 if layout.endswith("train") else 20, (18, 18, 3))
    assert sorted(top.rglob("*")) == before  # the input is read-only: the cache is elsewhere


def test_none_and_several_are_refused(top: Path) -> None:
    with pytest.raises(TrainError) as raised:
        loaded("folder")
    assert raised.value.code == 66
    assert_names(raised.value, "input", "--data-dir")
    write_pictures(top / "cats")
    write_pictures(top / "dogs")
    with pytest.raises(TrainError) as raised:
        loaded("folder")
    assert raised.value.code == 78
    assert f"{top}/cats, {top}/dogs" in str(raised.value)
    assert_names(raised.value, "cats", "dogs", "--data-dir")


def test_what_is_given_and_what_is_elsewhere_stays(top: Path, tmp_path: Path) -> None:
    write_pictures(top / "cats")
    given = DataOptions(name="folder", folder=tmp_path)
    environ = {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "DDP_KAGGLE_INPUT": str(top)}
    assert locate(given, environ) == given
    assert locate(DataOptions(name="folder"), {}) == DataOptions(name="folder")
    assert locate(DataOptions(name="digits"), environ) == DataOptions(name="digits")
    nothing = locate(DataOptions(name="mnist"), environ)
    assert nothing.folder == Path(tempfile.gettempdir()) / "ddptrain" / "download-mnist"
