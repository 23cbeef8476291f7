"""Where the ranks are while one of them hangs: what the kernel says, and then the Python stacks of all their threads.

The stacks come from the ranks' own last words: ddprun gives them PYTHONFAULTHANDLER, by which a Python that is sent
SIGABRT writes the stacks of its threads to stderr and ends, also when its main thread is deep in C++. A rank that was
stopped says them when it is continued. So this ends the ranks.
"""

import contextlib
import resource
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from ddprun.ranks import Ranks
from ddpwire.node import RankProcess

PATIENCE_S = 1.0
KERNEL_SAYS = ("status", "wchan", "stack")
KEPT_OF_STATUS = ("State", "Threads", "VmRSS", "SigBlk", "SigIgn", "SigCgt")


def keep(path: Path, processes: Sequence[RankProcess], ranks: Ranks) -> None:
    """Write all that can be known into ``path``. A disk that is full costs the file only."""
    notes = [_kernel(rank) for rank in processes]
    logs = [Path(rank.log) for rank in processes]
    sizes = [log.stat().st_size if log.exists() else 0 for log in logs]
    for rank in processes:
        _without_core(rank.pid)
    ranks.signal(signal.SIGABRT)
    ranks.signal(signal.SIGCONT)
    deadline = time.monotonic() + PATIENCE_S
    while ranks.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # their last words are on their way through the pipe
    try:
        with path.open("wb") as file:
            for rank, note, log, size in zip(processes, notes, logs, sizes, strict=True):
                file.write(f"==== rank {rank.rank} (pid {rank.pid})\n{note}".encode())
                with log.open("rb") as said:
                    said.seek(size)
                    file.write(said.read() + b"\n")
    except OSError:
        path.unlink(missing_ok=True)


def _without_core(pid: int) -> None:
    """A rank's memory is large, and tells nothing that its stacks do not."""
    with contextlib.suppress(OSError, AttributeError):  # it has ended, or this is not Linux
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))


def _kernel(rank: RankProcess) -> str:
    """What /proc says of a rank; the kernel's own stack only to root."""
    lines = []
    for name in KERNEL_SAYS:
        try:
            text = Path(f"/proc/{rank.pid}/{name}").read_text().strip()
        except OSError:
            continue
        for line in text.splitlines():
            if name != "status":
                lines.append(f"{name}: {line}")
            elif line.partition(":")[0] in KEPT_OF_STATUS:
                lines.append(line)
    return "".join(f"{line}\n" for line in lines)
