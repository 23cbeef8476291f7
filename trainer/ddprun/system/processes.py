"""Linux processes: find and kill descendants, and ensure that no process outlives its parent.

The supervisor uses this module, so it needs only the standard library. On systems other than Linux, no process is
found, and the functions do nothing.
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
    """A process, as in /proc/PID/stat, see proc(5)."""

    pid: int
    name: str
    state: str
    parent: int
    session: int
    ticks: int  # of CPU time

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.state not in "ZX"


def close_descriptors(*kept: int) -> None:
    """Close the descriptors above stderr, except ``kept``. The process has no other thread.

    os.closerange up to SC_OPEN_MAX takes minutes where close_range(2) is missing: containers allow 2^30 descriptors.
    """
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208 (numbers, not paths)
        if number > 2 and number not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                os.close(number)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent has ended (PR_SET_CHILD_SUBREAPER)."""
    if LIBC:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int | None) -> None:
    """Make the kernel send SIGKILL to this process when ``parent`` ends. None cancels this.

    ``parent`` has just forked this process.
    """
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL) if parent else 0, 0, 0, 0)
    if parent and os.getppid() != parent:  # the parent ended before the prctl
        os._exit(128 + signal.SIGKILL)


def fork(run: Callable[[], object]) -> int:
    """Fork a process that calls ``run``, and that ends with it or with this process. Return its pid. Raises OSError."""
    parent, pid = os.getpid(), os.fork()
    if not pid:
        try:
            die_with_parent(parent)
            run()
        finally:
            os._exit(1)  # never return to the code that called this
    return pid


def list_processes() -> list[Process]:
    """Return every process of this machine."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [process for pid in pids if (process := read_process(pid))]


def read_process(pid: int) -> Process | None:
    """Return a process, or None if there is no such process."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name in parentheses may itself contain spaces and parentheses.
        start, _, end = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        state, parent, _, session, *rest = end.split()
        return Process(pid, start.partition("(")[2], state, int(parent), int(session), int(rest[7]) + int(rest[8]))
    return None


def descendants(root: int) -> list[int]:
    """Return the living descendants of ``root``."""
    processes = list_processes()
    family, size = {root}, 0
    while len(family) != size:
        size = len(family)
        family |= {process.pid for process in processes if process.parent in family}
    return [process.pid for process in processes if process.alive and process.pid in family - {root}]


def kill_all(find: Callable[[], list[int]], *, timeout_s: float, reap: Callable[[], None] = lambda: None) -> None:
    """SIGKILL the processes that ``find`` returns, even if they keep forking. Give up after ``timeout_s``.

    ``reap`` reaps those of them that are this process's children.
    """
    deadline = time.monotonic() + timeout_s
    while (pids := find()) and time.monotonic() < deadline:
        for pid in pids:
            kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        reap()
    reap()


def asleep_in_kernel(root: int) -> list[str]:
    """Return the descendants of ``root`` that sleep in the kernel, where no signal ends them, each with its pid."""
    family = map(read_process, descendants(root))
    return [f"{process.name} (pid {process.pid})" for process in family if process and process.state == "D"]


def kill_session(leader: int) -> None:
    """SIGKILL what a rank left in its process group and session when it ended, such as DataLoader workers."""
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)
    for process in list_processes():
        if process.session == leader and process.alive:
            kill(process.pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal, not by a debugger."""
    process = read_process(pid)
    return process is not None and process.state == "T"


def kill(pid: int, number: int) -> None:
    """Send a signal to a process; do nothing if it no longer exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def reap_all() -> None:
    """Reap every child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
