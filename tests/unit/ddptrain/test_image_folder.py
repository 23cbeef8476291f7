"""A folder of pictures: what is found, decoded, kept, and refused."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.facts import assert_names
from tests.unit.ddptrain.formats import write_pictures

from ddptrain.config import DataOptions, parse_options
from ddptrain.data import image_folder
from ddptrain.errors import TrainError


def options(where: Path, *arguments: str) -> DataOptions:
    return parse_options(["--data=folder", f"--data-dir={where}", "--image-size=28", *arguments], {}).data


def refused(given: DataOptions) -> TrainError:
    def open_it() -> None:
        image_folder.prepare_image_folder(given)
        image_folder.load_image_folder(given, 0)

    with pytest.raises(TrainError) as error:
        open_it()
    assert "\n" not in str(error.value)
    return error.value


def test_files_that_are_left_out_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pictures(tmp_path)
    image_folder.prepare_image_folder(options(tmp_path))
    assert capsys.readouterr().err == ""
    for name in ("labels.csv", "class0/a.gif", "class0/b.gif", "class1/.hidden", "class1/deep/x.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    image_folder.prepare_image_folder(options(tmp_path))
    warning = capsys.readouterr().err
    assert "labels.csv, class0/a.gif, class0/b.gif and 1 more\n" in warning
    assert_names(warning, "labels.csv", "class0/a.gif", "class0/b.gif", "1")


def test_pictures_become_squares_once(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    given = options(tmp_path)
    image_folder.prepare_image_folder(given)
    files = sorted((tmp_path / ".ddptrain").iterdir())
    times = [file.stat().st_mtime_ns for file in files]
    image_folder.prepare_image_folder(given)
    assert [file.stat().st_mtime_ns for file in files] == times
    assert len(files) == 2
    data = image_folder.load_image_folder(given, 0)
    assert (data.classes, image_folder.list_pictures(tmp_path).classes) == (3, ("class0", "class1", "class2"))
    assert (data.train.images_NHWC.shape, data.test.images_NHWC.shape) == ((22, 32, 32, 3), (2, 32, 32, 3))
    assert (data.shape.size_px, data.shape.channels, data.augmentation.flip) == (28, 3, True)
    assert data.train.file in files
    red = data.train.images_NHWC[:, 16, 16, 0].float() / 80  # JPEG is not exact
    assert torch.equal(red.round().long(), data.train.labels_N)


def test_a_changed_folder_is_decoded_again(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    image_folder.prepare_image_folder(options(tmp_path))
    Image.new("RGB", (64, 64), (255, 255, 255)).save(tmp_path / "class1" / "new.png")
    image_folder.prepare_image_folder(options(tmp_path))
    assert len(image_folder.load_image_folder(options(tmp_path), 0).train) == 23


def test_train_and_val_are_kept_apart(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", each=4)
    write_pictures(tmp_path / "val", each=2)
    given = options(tmp_path, f"--cache-dir={tmp_path / 'cache'}")
    image_folder.prepare_image_folder(given)
    data = image_folder.load_image_folder(given, 0)
    assert (len(data.train), len(data.test), data.test.labels_N.tolist()) == (12, 6, [0, 0, 1, 1, 2, 2])
    assert len(list((tmp_path / "cache").iterdir())) == 2
    (tmp_path / "val" / "class9").mkdir()
    error = refused(given)
    assert error.code == 65
    assert_names(error, "val")


def test_a_square_is_the_middle_of_the_picture(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    wide = np.zeros((32, 96, 3), dtype=np.uint8)
    wide[:, 32:64] = 200
    Image.fromarray(wide).save(tmp_path / "class0" / "0.png")
    given = options(tmp_path)
    image_folder.prepare_image_folder(given)
    found = image_folder.list_pictures(tmp_path)
    data = image_folder.load_image_folder(given, 0)
    at = [path.name for path in found.train].index("0.png")
    assert found.train[at].parent.name == "class0"
    assert int(data.train.images_NHWC[at].min()) == 200


@pytest.mark.parametrize("content", [b"not a picture", b""], ids=["text", "empty"])
def test_a_corrupt_picture_is_named(tmp_path: Path, content: bytes) -> None:
    write_pictures(tmp_path)
    (tmp_path / "class2" / "3.png").write_bytes(content)
    error = refused(options(tmp_path))
    assert error.code == 65
    assert str(tmp_path / "class2/3.png") in str(error)
    assert_names(re.sub(": .*; ", ": REASON; ", str(error)), "3.png")
    assert list((tmp_path / ".ddptrain").iterdir()) == []  # nothing half done


def test_a_torn_picture_is_named(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    torn = tmp_path / "class1" / "0.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(torn)
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    error = refused(options(tmp_path))
    assert (error.code, "image file is truncated" in str(error)) == (65, True)
    assert_names(str(error).partition(": ")[0], "0.jpg")


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    error = refused(options(tmp_path / "none"))
    assert error.code == 66
    assert_names(error, "--data-dir", "none", "CLASS/*.png")
    (tmp_path / "class0").mkdir()
    error = refused(options(tmp_path))
    assert error.code == 66
    assert_names(error, "--data-dir", "0", "1")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    write_pictures(tmp_path / "pictures")
    (tmp_path / "file").touch()
    error = refused(options(tmp_path / "pictures", f"--cache-dir={tmp_path / 'file'}"))
    assert error.code == 73
    assert_names(error, "file", "--cache-dir")
