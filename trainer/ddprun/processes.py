"""Linux processes: which process descends from which, and how to ensure that none outlives its parent.

This module uses only the standard library, as the supervisor must. On systems other than Linux, the tables are empty
and the calls do nothing.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Process(NamedTuple):
    """A line of /proc/PID/stat, see proc(5)."""

    pid: int
    parent: int
    session: int
    alive: bool  # not a zombie


def adopt_orphans() -> None:
    """Become the parent of the children of every descendant that dies (PR_SET_CHILD_SUBREAPER)."""
    if LIBC:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int | None) -> None:
    """Make the kernel SIGKILL this process when ``parent``, which has just forked it, ends. ``None`` undoes this."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL) if parent else 0, 0, 0, 0)
    if parent and os.getppid() != parent:  # the parent ended before the prctl
        os._exit(128 + signal.SIGKILL)


def list_processes() -> list[Process]:
    """Return every process of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in parentheses may itself hold spaces and parentheses.
            state, parent, _, session = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            found.append(Process(int(path.parent.name), int(parent), int(session), state not in "ZX"))
    return found


def descendants(root: int) -> list[int]:
    """Return the living descendants of ``root``."""
    processes = list_processes()
    family, size = {root}, 0
    while len(family) != size:
        size = len(family)
        family |= {process.pid for process in processes if process.parent in family}
    return [process.pid for process in processes if process.alive and process.pid in family - {root}]


def kill_descendants(root: int, *, timeout_s: float, reap: Callable[[], None]) -> bool:
    """SIGKILL all descendants of ``root`` until none is left, even if they keep forking. Return False on time-out."""
    deadline = time.monotonic() + timeout_s
    while family := descendants(root):
        if time.monotonic() > deadline:
            return False
        for pid in family:
            kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        reap()
    reap()
    return True


def kill_session(leader: int) -> None:
    """SIGKILL the processes that an ended rank left in its process group and session, such as DataLoader workers."""
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)
    for process in list_processes():
        if process.session == leader and process.alive:
            kill(process.pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal, not by a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):  # it has ended, or there is no /proc
        return False


def kill(pid: int, number: int) -> None:
    """Send a signal to a process; do nothing if it no longer exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def reap_all() -> None:
    """Reap every child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
