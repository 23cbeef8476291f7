"""A disk that is really full, while a training saves on it: a small tmpfs. Needs root."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from tests import forks

from ddptrain.checkpoint import load_checkpoint

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a tmpfs is mounted")
TIMEOUT_S = 600.0  # for hangs only


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """2 MB; a checkpoint of the digits has 0.3."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], check=True, timeout=10)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)


def failures(folder: Path) -> float:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    labels = {"op": "save", "reason": "enospc"}
    return registry.get_sample_value("ddp_checkpoint_failures_total", labels) or 0.0


def test_full_disk_leaves_the_training_and_its_checkpoints_whole(disk: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    options = ("--epochs=12", "--checkpoint-dir", str(disk / "checkpoints"), "--keep=2", "--device=cpu")
    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(metrics), "OMP_NUM_THREADS": "1"}
    errors = tmp_path / "errors"
    with errors.open("w") as err, (tmp_path / "out").open("w") as out:
        process = forks.start(["-m", "ddptrain", *options], cwd=tmp_path, env=environ, stdout=out, stderr=err)
    try:
        wait_until(lambda: len(list(disk.glob("checkpoints/step-*.json"))) >= 2, "two checkpoints", process)
        filler = disk / "filler"
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        filler.write_bytes(b"\0" * (free - 100_000))
        wait_until(lambda: errors.read_text().count("\n") >= 3, "three failures", process)
        newest = max(disk.glob("checkpoints/step-*.pt"))
        assert load_checkpoint(newest).step == int(newest.name[5:13])  # what was there is whole
        assert not [path for path in disk.glob("checkpoints/.step-*") if path.suffix != ".part"]
        filler.unlink()
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
    warnings = errors.read_text().splitlines()
    assert [line for line in warnings if not re.search(r"step-\d+\.pt: No space left on device", line)] == []
    assert failures(metrics) == len(warnings)
    assert load_checkpoint(disk / "checkpoints/step-00000540.pt").step == 540


def wait_until(condition: Callable[[], object], event: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, f"the training exited with {process.returncode} before {event}"
        assert time.monotonic() < deadline, f"waited {TIMEOUT_S:g} s for {event}"
        time.sleep(0.005)
