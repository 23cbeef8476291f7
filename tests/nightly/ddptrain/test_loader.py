"""The loader's processes end with their rank, however it ends."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest


def below(pid: int) -> list[int]:
    """All descendants of a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [process for child in map(int, children) for process in (child, *below(child))]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_its_rank(number: signal.Signals, start: Callable) -> None:
    world = start("--epochs=300", "--input=loader")
    world.wait_for("epoch  2/300")
    rank = world.ranks[0]
    remaining = below(rank.pid)
    assert len(remaining) >= 3  # the server and its two workers
    rank.send_signal(number)
    rank.wait(timeout=60)
    deadline = time.monotonic() + 30
    while remaining := [pid for pid in remaining if Path(f"/proc/{pid}").exists() and _state(pid) != "Z"]:
        assert time.monotonic() < deadline, remaining
        time.sleep(0.05)


@pytest.mark.parametrize("which", ["the fork server, before it has workers", "a worker"])
def test_a_killed_worker_is_no_error_of_the_script(which: str, start: Callable) -> None:
    world = start("--epochs=300", "--input=loader")
    rank = world.ranks[0]
    if which == "a worker":
        world.wait_for("epoch  2/300")
    deadline = time.monotonic() + 60
    while not (pids := [pid for pid in below(rank.pid) if is_loader(pid)]):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(pids[-1], signal.SIGKILL)
    (ended,) = world.end()
    assert ended.code == 137
    assert ended.err.count("a worker process that reads images ended unexpectedly") == 1
    assert "Traceback" not in ended.err


def is_loader(pid: int) -> bool:
    """Whether it is the fork server or a worker, which both have its command line."""
    try:
        return b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
