"""The other notebooks of examples/kaggle, on synthetic images in the real format of CIFAR's files."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.test_kaggle_notebooks import kaggle_session, run_and_check  # noqa: F401

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

IMAGES = 2  # in each of CIFAR's files
# What a papermill would put after the cell tagged parameters: less of the same.
FEWER = {
    "resnet18": ["--recipe", "cifar10-resnet18", "--epochs", "1", "--batch-size", "4"],
    "imageclassifier": ["--recipe", "cifar10-imageclassifier", "--epochs", "1", "--batch-size", "4"],
}


def write_cifar(folder: Path) -> None:
    """As the Python version's files are (https://www.cs.toronto.edu/~kriz/cifar.html)."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = generator.integers(0, 256, (IMAGES, 3072), dtype=np.uint8)
        batch = {"data": rows, "labels": [int(label) for label in generator.integers(0, 10, IMAGES)]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {n}" for n in range(10)]}, protocol=2))


@pytest.mark.parametrize("name", FEWER)
def test_a_notebook_runs_from_top_to_bottom(
    name: str, session: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    write_cifar(tmp_path / "input" / "cifar10-python" / "cifar-10-batches-py")
    run_and_check(name, session, FEWER[name], record_property)
