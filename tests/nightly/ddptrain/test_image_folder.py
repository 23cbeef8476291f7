"""A folder of pictures: what is found, decoded, kept, and refused."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.messages import assert_names
from tests.unit.ddptrain.formats import write_pictures
from tests.unit.ddptrain.test_datasets import folder_options, opened

from ddptrain.config import DataOptions
from ddptrain.data import image_folder
from ddptrain.errors import TrainError


def refusal_of(given: DataOptions) -> TrainError:
    with pytest.raises(TrainError) as error:
        opened(given)
    assert "\n" not in str(error.value)
    return error.value


def test_two_ranks_report_a_corrupt_picture_once_and_at_once(train: Callable[..., list], tmp_path: Path) -> None:
    write_pictures(tmp_path / "pictures")
    (tmp_path / "pictures" / "class2" / "3.png").write_bytes(b"torn")
    began = time.monotonic()
    ended = train("--data=folder", "--data-dir=pictures", size=2)
    took_s = time.monotonic() - began
    assert [(rank.code, rank.out) for rank in ended] == [(65, "")] * 2
    assert_names(ended[0].err.rpartition(": ")[0], "pictures/class2/3.png")
    assert (ended[0].err.count("\n"), ended[1].err) == (1, "")
    assert took_s < 60  # on a busy machine; docs/results/benchmarks.md has it on a quiet one


def test_files_that_are_left_out_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pictures(tmp_path)
    image_folder.prepare_image_folder(folder_options(tmp_path))
    assert capsys.readouterr().err == ""
    for name in ("labels.csv", "class0/a.gif", "class0/b.gif", "class1/.hidden", "class1/deep/x.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    image_folder.prepare_image_folder(folder_options(tmp_path))
    warning = capsys.readouterr().err
    assert "labels.csv, class0/a.gif, class0/b.gif and 1 more\n" in warning
    assert_names(warning, "labels.csv", "class0/a.gif", "class0/b.gif", "1")


def test_a_changed_folder_is_decoded_again(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    image_folder.prepare_image_folder(folder_options(tmp_path))
    Image.new("RGB", (64, 64), (255, 255, 255)).save(tmp_path / "class1" / "new.png")
    image_folder.prepare_image_folder(folder_options(tmp_path))
    assert len(image_folder.load_image_folder(folder_options(tmp_path), 0).train) == 23


def test_a_torn_picture_is_named(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    torn = tmp_path / "class1" / "0.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(torn)
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    error = refusal_of(folder_options(tmp_path))
    assert (error.code, "image file is truncated" in str(error)) == (65, True)
    assert_names(str(error).partition(": ")[0], "0.jpg")


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    error = refusal_of(folder_options(tmp_path / "none"))
    assert error.code == 66
    assert_names(error, "--data-dir", "none", "CLASS/*.png")
    (tmp_path / "class0").mkdir()
    error = refusal_of(folder_options(tmp_path))
    assert error.code == 66
    assert_names(error, "--data-dir", "0", "1")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    write_pictures(tmp_path / "pictures")
    (tmp_path / "file").touch()
    error = refusal_of(folder_options(tmp_path / "pictures", f"--cache-dir={tmp_path / 'file'}"))
    assert error.code == 73
    assert_names(error, "file", "--cache-dir")


def test_pictures_become_squares_once(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    given = folder_options(tmp_path)
    image_folder.prepare_image_folder(given)
    files = sorted((tmp_path / ".ddptrain").iterdir())
    times = [file.stat().st_mtime_ns for file in files]
    image_folder.prepare_image_folder(given)
    assert [file.stat().st_mtime_ns for file in files] == times
    assert len(files) == 2
    data = image_folder.load_image_folder(given, 0)
    assert (data.classes, image_folder.list_pictures(tmp_path).classes) == (3, ("class0", "class1", "class2"))
    assert (data.train.images_NHWC.shape, data.test.images_NHWC.shape) == ((22, 32, 32, 3), (2, 32, 32, 3))
    assert (data.shape.size_px, data.shape.channels, data.flip) == (28, 3, True)
    assert data.train.file in files
    red = data.train.images_NHWC[:, 16, 16, 0].float() / 80  # JPEG is not exact
    assert torch.equal(red.round().long(), data.train.labels_N)
