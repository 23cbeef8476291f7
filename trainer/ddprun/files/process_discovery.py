"""Find the living processes of a run on this machine: a node's ddprun, a ddprun that is starting, and orphans.

A node's lock shows whether its ddprun is alive. ddprun takes the lock first, and its supervisor inherits it. If the
lock is free, ddprun, its supervisor and its ranks have ended. But a new ddprun may be starting, and orphans may remain:
processes that the ranks started, and that survived when the supervisor was killed. Both are found by their environment
in /proc, because all processes of a run inherit the path of its folder.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ddprun.system import processes
from ddpwire import locks, names
from ddpwire.run_files import LOCK, NODE, OUTCOME


def is_locked(node_dir: Path) -> bool:
    """Return whether the node's ddprun or its supervisor is alive."""
    try:
        return locks.is_locked(node_dir / LOCK)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    except OSError:  # unknown: it counts as alive
        return True


def all_processes() -> Iterator[tuple[int, list[bytes]]]:
    """Yield the pid and the environment of each living process of any run, except the caller and its parent."""
    mark = f"{names.RUN_DIR}=".encode()
    for process in processes.list_processes():
        if process.alive and process.pid not in (os.getpid(), os.getppid()):
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
                if mark in environ:
                    yield process.pid, environ.split(b"\0")


ProcessTable = Callable[[], Iterable[tuple[int, list[bytes]]]]  # all_processes, or a function that returns its result


def is_alive(node_dir: Path, table: ProcessTable = all_processes) -> bool:
    """Return whether the node's ddprun is alive, even if it is starting and has written no file yet."""
    if is_locked(node_dir):
        return True
    has_written = (node_dir / NODE).exists() or (node_dir / OUTCOME).exists()
    return not has_written and any(starting_processes(node_dir, table))


def starting_processes(node_dir: Path, table: ProcessTable = all_processes) -> Iterator[int]:
    """Yield the pids of the processes that were started for the node whose folder is ``node_dir``."""
    variable = f"{names.NODE_RANK}={node_dir.name.removeprefix('node-')}".encode()
    yield from (pid for pid, environ in run_processes(node_dir.parent, table) if variable in environ)


def run_processes(run_dir: Path, table: ProcessTable = all_processes) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the pid and the environment of each living process of the run, except the caller and its parent."""
    mark = f"{names.RUN_DIR}={run_dir}".encode()
    yield from ((pid, environ) for pid, environ in table() if mark in environ)
