"""The readers of images, pictures and text, on small files in the real formats; the layouts of a Kaggle session."""

import hashlib
import os
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.messages import assert_names, refused
from tests.unit.ddptrain.formats import write_cifar, write_mnist, write_pictures

from ddptrain.config import DataOptions, parse_options
from ddptrain.data import augment, base, datasets, image_folder
from ddptrain.data.datasets import SOURCES
from ddptrain.data.kaggle import locate
from ddptrain.data.text import TextBatches, load_text
from ddptrain.distributed import RankInfo, World
from ddptrain.errors import TrainError


def options(tmp_path: Path, *arguments: str) -> DataOptions:
    return parse_options(["--data-dir", str(tmp_path), *arguments], {}).data


def prepared(name: str, folder: Path) -> Any:
    """Return a data set whose files are in the folder."""
    source, given = SOURCES[name], options(folder, f"--data={name}")
    assert source.prepare is not None
    source.prepare(given)
    return source.load(given, 0)


def test_digits_are_split_once_and_for_all(tmp_path: Path) -> None:
    data = datasets.load_digits(options(tmp_path), 5)
    assert (data.train.images_NHWC.shape, data.train.images_NHWC.dtype) == ((1437, 8, 8, 1), torch.uint8)
    assert (data.test.images_NHWC.shape, data.test.labels_N.dtype) == ((360, 8, 8, 1), torch.int64)
    assert int(data.train.images_NHWC.max()) == 16
    held_out = hashlib.sha256(data.test.images_NHWC.numpy().tobytes() + data.test.labels_N.numpy().tobytes())
    assert held_out.hexdigest()[:16] == "8d1c8edc3122f776"
    images = torch.cat([data.train.images_NHWC, data.test.images_NHWC]).flatten(1)
    assert len(images.unique(dim=0)) == 1797  # none is in both


def test_mnist_is_read(tmp_path: Path) -> None:
    images, labels = write_mnist(tmp_path / "MNIST" / "raw")
    data = prepared("mnist", tmp_path)
    assert np.array_equal(data.train.images_NHWC[..., 0].numpy(), images)
    assert np.array_equal(data.test.labels_N.numpy(), labels[:20])
    assert (data.shape.channels, data.shape.size_px, data.shape.classes) == (1, 28, 10)


def test_cifar10_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, labels = write_cifar(tmp_path, "cifar10", monkeypatch)
    data = prepared("cifar10", tmp_path)
    assert np.array_equal(
        data.train.images_NHWC.numpy(), np.tile(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), (5, 1, 1, 1))
    )
    assert data.test.labels_N.tolist() == labels
    assert (data.shift_px, data.flip) == (4, True)


def test_cifar10_that_is_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None) -> None:
    write_cifar(tmp_path, "cifar10", monkeypatch)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(b"torn")
    with refused(TrainError, "cifar-10-python", "tar.gz", code=65):
        prepared("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("name", "file"), [("mnist", "train-images-idx3-ubyte.gz"), ("cifar10", "cifar-10-python.tar.gz")]
)
def test_without_a_network_the_error_names_the_files(
    name: str, file: str, tmp_path: Path, no_network: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with refused(TrainError, file, code=66):
        prepared(name, tmp_path)
    assert capfd.readouterr() == ("", "")


def test_synthetic_is_the_seeds(tmp_path: Path) -> None:
    arguments = ("--synthetic-samples", "80", "--synthetic-shape", "3x12x12", "--synthetic-classes", "4")
    first, same, other = (SOURCES["synthetic"].load(options(tmp_path, *arguments), seed) for seed in (1, 1, 2))
    assert first.train.images_NHWC.shape == (80, 12, 12, 3)
    assert (len(first.test), first.train.labels_N.unique().tolist()) == (10, [0, 1, 2, 3])
    assert torch.equal(first.train.images_NHWC, same.train.images_NHWC)
    assert not torch.equal(first.train.images_NHWC, other.train.images_NHWC)
    made = hashlib.sha256(first.train.images_NHWC.numpy().tobytes() + first.test.images_NHWC.numpy().tobytes())
    assert (
        made.hexdigest()[:16] == "f037a52e611e2e0d"
    )  # other parts, other draws: checkpoints would not be gone on with alike


def test_normalised_images_have_mean_0_and_deviation_1() -> None:
    images = torch.randint(0, 200, (100, 8, 8, 3), dtype=torch.uint8)
    images[..., 2] = 7  # a channel of one colour
    normalised = augment.normalisation_of_images(images)(images)
    assert normalised.shape == (100, 3, 8, 8)
    assert torch.allclose(normalised.mean((0, 2, 3)), torch.zeros(3), atol=1e-4)
    assert torch.allclose(normalised.std((0, 2, 3), correction=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-4)


CPU = World(rank_info=RankInfo(), device=torch.device("cpu"), backend="gloo", data_group=None)


def text(folder: Path, size: int = 1000) -> Path:
    path = folder / "some.txt"
    path.write_bytes(bytes(number % 251 for number in range(size)))
    return path


def test_each_byte_at_the_end_is_predicted_once_and_no_window_is_trained_on_twice(tmp_path: Path) -> None:
    path = text(tmp_path)
    options = parse_options(["--data=text", f"--data-dir={path}", "--context=16", "--no-augment"], {})
    data = load_text(options.data, 0)
    tested = data.test.batch(torch.arange(len(data.test))).labels_B.flatten()
    assert bytes(tested.tolist()) == path.read_bytes()[-len(tested) :]
    assert len(tested) == 96
    trained = TextBatches(options, data, CPU.device).batch(torch.arange(len(data.train)), epoch=0)
    assert torch.equal(trained.inputs[:, 1:], trained.labels_B[:, :-1])
    assert bytes(trained.inputs.flatten().tolist()) == path.read_bytes()[: trained.inputs.numel()]


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


def folder_options(where: Path, *arguments: str) -> DataOptions:
    return parse_options(["--data=folder", f"--data-dir={where}", "--image-size=28", *arguments], {}).data


def opened(given: DataOptions) -> Any:
    image_folder.prepare_image_folder(given)
    return image_folder.load_image_folder(given, 0)


def test_train_and_val_are_kept_apart(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", each=4)
    write_pictures(tmp_path / "val", each=2)
    given = folder_options(tmp_path, f"--cache-dir={tmp_path / 'cache'}")
    data = opened(given)
    assert (len(data.train), len(data.test), data.test.labels_N.tolist()) == (12, 6, [0, 0, 1, 1, 2, 2])
    assert len(list((tmp_path / "cache").iterdir())) == 2
    (tmp_path / "val" / "class9").mkdir()
    with refused(TrainError, "val", code=65):
        opened(given)


def test_a_square_is_the_middle_of_the_picture(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    wide = np.zeros((32, 96, 3), dtype=np.uint8)
    wide[:, 32:64] = 200
    Image.fromarray(wide).save(tmp_path / "class0" / "0.png")
    data = opened(folder_options(tmp_path))
    pictures = image_folder.list_pictures(tmp_path)
    at = [path.name for path in pictures.train].index("0.png")
    assert pictures.train[at].parent.name == "class0"
    assert int(data.train.images_NHWC[at].min()) == 200


@pytest.mark.parametrize("content", [b"not a picture", b""], ids=["text", "empty"])
def test_a_corrupt_picture_is_named(tmp_path: Path, content: bytes) -> None:
    write_pictures(tmp_path)
    (tmp_path / "class2" / "3.png").write_bytes(content)
    with pytest.raises(TrainError) as error:
        opened(folder_options(tmp_path))
    assert (error.value.code, str(tmp_path / "class2/3.png") in str(error.value)) == (65, True)
    assert_names(re.sub(": .*; ", ": REASON; ", str(error.value)), "3.png")
    assert list((tmp_path / ".ddptrain").iterdir()) == []  # nothing half done


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"job/memory.max": "max", "job/memory.current": "7", "memory.max": "900", "memory.current": "500",
          "memory.stat": "anon 1\ninactive_file 200\n"}, 600.0),
        ({"memory/job/memory.limit_in_bytes": "800", "memory/job/memory.usage_in_bytes": "300",
          "memory/job/memory.stat": "total_inactive_file 0\n"}, 500.0),
    ],
    ids=["v2", "v1"],
)  # fmt: skip
def test_the_memory_of_a_cgroup_is_free_up_to_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], free: float
) -> None:
    (tmp_path / "own").write_text("3:memory:/job\n0::/job\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(base, "cgroups", partial(base.cgroups, own=tmp_path / "own", root=tmp_path))
    assert base.free_bytes(torch.device("cpu")) == free
