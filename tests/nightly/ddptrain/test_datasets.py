"""Further readers, and what each refuses."""

import gzip
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.messages import assert_names
from tests.unit.ddptrain.formats import write_cifar, write_mnist
from tests.unit.ddptrain.test_datasets import options

from ddptrain.data import augment, datasets
from ddptrain.data.datasets import SOURCES
from ddptrain.errors import TrainError


def test_digits_that_are_corrupt(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    whole = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz").read_bytes()
    path = tmp_path / "digits.csv.gz"
    for content in (whole[:1000], b"not gzip", gzip.compress(b"1,2\n3\n"), gzip.compress(b""), gzip.compress(b"a,b\n")):
        path.write_bytes(content)
        with pytest.raises(TrainError) as error:
            datasets.read_digits(path)
        assert error.value.code == 65
        assert "\n" not in str(error.value)
        assert_names(str(error.value).partition(" (")[0], "digits.csv.gz")


def test_cifar100_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, labels = write_cifar(tmp_path, "cifar100", monkeypatch)
    given = options(tmp_path, "--data=cifar100")
    source = SOURCES["cifar100"]
    assert source.prepare is not None
    source.prepare(given)
    data = source.load(given, 0)
    assert np.array_equal(data.test.images_NHWC.numpy(), rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    assert (data.train.labels_N.tolist(), data.classes, data.name) == (labels, 100, "cifar100")


def test_a_file_in_the_folders_place(tmp_path: Path, no_network: None) -> None:
    (tmp_path / "file").touch()
    prepare = SOURCES["mnist"].prepare
    assert prepare is not None
    with pytest.raises(TrainError) as error:
        prepare(options(tmp_path / "file", "--data=mnist"))
    assert error.value.code == 73
    assert_names(error.value, "raw")


def test_synthetic_images_that_do_not_fit_into_the_memory(tmp_path: Path) -> None:
    with pytest.raises(TrainError) as error:
        SOURCES["synthetic"].load(options(tmp_path, "--synthetic-samples=1000000000000"), 0)
    assert error.value.code == 78
    assert "900,000.0 GB" in str(error.value)
    assert_names(
        re.sub(r"[0-9.,]+ [GM]B are", "N GB are", str(error.value)),
        "1,125,000,000,000",
        "1x28x28",
        "900,000.0",
        "--synthetic-samples",
        "--synthetic-shape",
    )


def test_imagenets_normalisation_is_torchvisions() -> None:
    from torchvision.transforms.v2.functional import normalize

    images = torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8)
    theirs = normalize(images.permute(0, 3, 1, 2) / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    assert torch.allclose(augment.normalisation_of_imagenet(3)(images), theirs, atol=1e-5)


def test_mnist_that_is_corrupt(tmp_path: Path, no_network: None) -> None:
    raw = tmp_path / "MNIST" / "raw"
    write_mnist(raw)
    given = options(tmp_path, "--data=mnist")
    labels = raw / "t10k-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-3])
    with pytest.raises(TrainError) as error:
        SOURCES["mnist"].load(given, 0)
    assert error.value.code == 65
    assert_names(str(error.value).partition(": ")[0], "raw")
    (raw / "train-images-idx3-ubyte").write_bytes(b"")
    assert SOURCES["mnist"].prepare is not None
    with pytest.raises(TrainError) as error:
        SOURCES["mnist"].prepare(given)
    assert error.value.code == 65
    assert_names(
        error.value,
        "raw",
        "train-images-idx3-ubyte.gz",
        "train-labels-idx1-ubyte.gz",
        "t10k-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
    )
