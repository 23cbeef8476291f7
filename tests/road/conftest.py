"""What every run of the whole road gets: the system's programs, and proof that nothing of it is left."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.road.driver import processes_of


@pytest.fixture(autouse=True)
def real_programs(monkeypatch: pytest.MonkeyPatch, clean_environment: None) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, real_programs: None) -> Iterator[None]:
    """Whatever a test did, no process of its runs outlives it; if one does, the test fails."""
    yield
    folder = tmp_path / "runs"
    left = {}
    for run in [path.name for path in folder.iterdir()] if folder.is_dir() else []:
        left |= processes_of(run)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == {}
