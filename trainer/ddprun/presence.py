"""Who of a run is alive on this machine: a node's ddprun, one that is about to be, and what either left behind.

The lock is the truth about a ddprun. Before it has taken it, and for what has run away from a keeper that was killed,
there is the environment that every process of a run was started with, where the system shows it (/proc).
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from ddprun import lock, processes
from ddpwire import names
from ddpwire.folder import NODE, OUTCOME

POLL_S = 0.02


def is_alive(node_dir: Path) -> bool:
    """Whether the node's ddprun is there, or has been started and not said a word yet."""
    if lock.is_held(node_dir):
        return True
    said = (node_dir / NODE).exists() or (node_dir / OUTCOME).exists()
    return not said and any(starting(node_dir))


def starting(node_dir: Path) -> Iterator[int]:
    """Processes that were started as this node's ddprun."""
    match = re.fullmatch(r"node-(\d+)", node_dir.name)
    place = f"{names.NODE_RANK}={match[1] if match else ''}".encode()
    yield from (pid for pid, environ in of_run(node_dir.parent) if place in environ)


def of_run(run_dir: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Every living process that was started for the run, with its environment; never the caller or its parent."""
    mark = f"{names.RUN_DIR}={run_dir}".encode()
    for process in processes.table():
        if process.alive and process.pid not in (os.getpid(), os.getppid()):
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                if mark in environ:
                    yield process.pid, environ


def sweep(run_dir: Path, *, timeout_s: float) -> bool:
    """SIGKILL whatever of the run is left, however far it has gone from its parents. False: some would not die."""
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid, _ in of_run(run_dir)]:
        if time.monotonic() > deadline:
            return False
        for pid in left:
            processes.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    return True
