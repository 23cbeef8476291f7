"""A folder of pictures: what is found, decoded, kept, and refused."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.ddptrain.formats import write_pictures

from ddptrain.datasets import folder
from ddptrain.errors import TrainError
from ddptrain.options import parse
from ddptrain.options.data import DataOptions


def options(where: Path, *arguments: str) -> DataOptions:
    return parse(["--data=folder", f"--data-dir={where}", "--image-size=28", *arguments], {}).data


def told(given: DataOptions, where: Path) -> tuple[int, str]:
    def open_it() -> None:
        folder.prepare(given)
        folder.load(given, 0)

    with pytest.raises(TrainError) as error:
        open_it()
    assert "\n" not in error.value.message
    return int(error.value.code), error.value.message.replace(str(where), "pictures")


def test_files_that_are_left_out_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pictures(tmp_path)
    folder.prepare(options(tmp_path))
    assert capsys.readouterr().err == ""
    for name in ("labels.csv", "class0/a.gif", "class0/b.gif", "class1/.hidden", "class1/deep/x.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    folder.prepare(options(tmp_path))
    assert capsys.readouterr().err.replace(str(tmp_path), "pictures") == (
        "ddptrain: warning: left out of pictures, being no .png, .jpg, .jpeg: "
        "labels.csv, class0/a.gif, class0/b.gif and 1 more\n"
    )


def test_pictures_become_squares_once(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    given = options(tmp_path)
    folder.prepare(given)
    files = sorted((tmp_path / ".ddptrain").iterdir())
    times = [file.stat().st_mtime_ns for file in files]
    folder.prepare(given)
    assert [file.stat().st_mtime_ns for file in files] == times
    assert len(files) == 2
    data = folder.load(given, 0)
    assert (data.classes, data.class_names) == (3, ("class0", "class1", "class2"))
    assert (data.train.images_NHWC.shape, data.test.images_NHWC.shape) == ((22, 32, 32, 3), (2, 32, 32, 3))
    assert (data.shape.size_px, data.shape.channels, data.augmentation.flip) == (28, 3, True)
    assert data.train.file in files
    red = data.train.images_NHWC[:, 16, 16, 0].float() / 80  # JPEG is not exact
    assert torch.equal(red.round().long(), data.train.labels_N)


def test_a_changed_folder_is_decoded_again(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    folder.prepare(options(tmp_path))
    Image.new("RGB", (64, 64), (255, 255, 255)).save(tmp_path / "class1" / "new.png")
    folder.prepare(options(tmp_path))
    assert len(folder.load(options(tmp_path), 0).train) == 23


def test_train_and_val_are_kept_apart(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", each=4)
    write_pictures(tmp_path / "val", each=2)
    given = options(tmp_path, f"--cache-dir={tmp_path / 'cache'}")
    folder.prepare(given)
    data = folder.load(given, 0)
    assert (len(data.train), len(data.test), data.test.labels_N.tolist()) == (12, 6, [0, 0, 1, 1, 2, 2])
    assert len(list((tmp_path / "cache").iterdir())) == 2
    (tmp_path / "val" / "class9").mkdir()
    assert told(given, tmp_path) == (65, "pictures/val has classes that are not in train: class9")


def test_a_square_is_the_middle_of_the_picture(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    wide = np.zeros((32, 96, 3), dtype=np.uint8)
    wide[:, 32:64] = 200
    Image.fromarray(wide).save(tmp_path / "class0" / "0.png")
    given = options(tmp_path)
    folder.prepare(given)
    found = folder.list_pictures(tmp_path)
    data = folder.load(given, 0)
    at = [path.name for path in found.train].index("0.png")
    assert found.train[at].parent.name == "class0"
    assert int(data.train.images_NHWC[at].min()) == 200


@pytest.mark.parametrize("content", [b"not a picture", b""])
def test_a_corrupt_picture_is_named(tmp_path: Path, content: bytes) -> None:
    write_pictures(tmp_path)
    (tmp_path / "class2" / "3.png").write_bytes(content)
    code, message = told(options(tmp_path), tmp_path)
    assert code == 65
    assert message.startswith("pictures/class2/3.png is corrupt: ")
    assert message.endswith("; delete it, or get it again")
    assert list((tmp_path / ".ddptrain").iterdir()) == []  # nothing half done


def test_a_torn_picture_is_named(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    torn = tmp_path / "class1" / "0.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(torn)
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    assert told(options(tmp_path), tmp_path)[1].startswith("pictures/class1/0.jpg is corrupt: image file is truncated")


def test_what_is_not_there(tmp_path: Path) -> None:
    assert told(options(tmp_path / "none"), tmp_path) == (
        66,
        "--data-dir pictures/none is not there: give a folder that holds CLASS/*.png or *.jpg",
    )
    (tmp_path / "class0").mkdir()
    assert told(options(tmp_path), tmp_path) == (
        66,
        "--data-dir pictures holds 0 pictures in 1 classes: "
        "it should hold a folder of .png or .jpg pictures for each of two or more classes",
    )


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    write_pictures(tmp_path / "pictures")
    (tmp_path / "file").touch()
    code, message = told(options(tmp_path / "pictures", f"--cache-dir={tmp_path / 'file'}"), tmp_path)
    assert (code, message) == (
        73,
        "decoded pictures cannot be written to pictures/file: File exists; give a --cache-dir",
    )


def test_two_ranks_tell_of_a_corrupt_picture_once_and_at_once(train: Callable[..., list], tmp_path: Path) -> None:
    write_pictures(tmp_path / "pictures")
    (tmp_path / "pictures" / "class2" / "3.png").write_bytes(b"torn")
    began = time.monotonic()
    ended = train("--data=folder", "--data-dir=pictures", size=2)
    took_s = time.monotonic() - began
    assert [(one.code, one.out) for one in ended] == [(65, "")] * 2
    assert ended[0].err.startswith("ddptrain: pictures/class2/3.png is corrupt: ")
    assert (ended[0].err.count("\n"), ended[1].err) == (1, "")
    assert took_s < 60  # on a busy machine; docs/benchmarks.md has it on a quiet one
