"""Each test here starts whole runs: it has the system's programs, and fails if a process is left."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import forks
from tests.e2e.driver import processes_of, wait_until
from tests.ranks import start, train

__all__ = ["start", "train"]

# These have the longest tests. They begin first, so that no worker waits at the end for one of them.
LONGEST = ("test_training.py", "test_notebook.py", "test_object_store.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(autouse=True)
def real_programs(monkeypatch: pytest.MonkeyPatch, clean_environment: None) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, real_programs: None) -> Iterator[None]:
    """Fail if a process of the test's runs outlives it, and end that process."""
    yield
    folder = tmp_path / "runs"
    remaining = {}
    for run in [path.name for path in folder.iterdir()] if folder.is_dir() else []:
        remaining |= processes_of(run)
    with contextlib.suppress(AssertionError):  # what has been killed ends soon
        wait_until(lambda: not forks.descendants(), "the end of the forks", timeout_s=10)
    remaining |= {process.pid: str(process) for process in forks.descendants()}
    for pid in remaining:
        os.kill(pid, signal.SIGKILL)
    assert remaining == {}
