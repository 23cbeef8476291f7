"""A folder of pictures: what is found, decoded, kept, and refused."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.messages import assert_names
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
