"""A Kaggle session: whether this process is in one, where its folders are, and when it ends.

Kaggle sets KAGGLE_KERNEL_RUN_TYPE in every session. Kaggle kills a session that reaches the time limit. The output of
that session is lost. So the ranks must save, and the notebook must end, before the limit.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

RUN_TYPE: Final = "KAGGLE_KERNEL_RUN_TYPE"  # Kaggle's own: Interactive, or Batch for a version that is saved and run
INPUT_FOLDER: Final = "/kaggle/input"
SESSION_S: Final = "DDP_KAGGLE_SESSION_S"  # a shorter session than Kaggle's longest
STARTED: Final = "DDP_KAGGLE_STARTED"  # seconds since the epoch, if the session began later than its container

RUNS: Final = "runs"  # in the working folder: the runs' folders
LONGEST_S: Final = 12 * 3600.0  # https://www.kaggle.com/docs/notebooks: 12 hours with or without a GPU
MARGIN_S: Final = 600.0  # the ranks end so long before the session, for the notebook to end and Kaggle to store files
# Two GPUs on PCIe in a virtual machine may report peer access and then hang. So data goes through the host's memory.
# There is no InfiniBand to look for.
NCCL: Final = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


@dataclass(frozen=True, kw_only=True)
class Session:
    """A Kaggle session."""

    input: Path  # data sets and other notebooks' outputs, read-only
    working: Path  # files written here are the output of the notebook's version
    batch: bool  # whether the session runs without a user


def session(environ: Mapping[str, str]) -> Session | None:
    """Return the session that this process is in, or None outside Kaggle."""
    if not environ.get(RUN_TYPE):
        return None
    return Session(
        input=Path(environ.get("DDP_KAGGLE_INPUT") or INPUT_FOLDER),  # other folders than Kaggle's, for tests
        working=Path(environ.get("DDP_KAGGLE_WORKING") or "/kaggle/working"),
        batch=environ[RUN_TYPE] == "Batch",
    )


def ends_at(environ: Mapping[str, str], *, started: float | None) -> float | None:
    """Return when Kaggle kills the session, in seconds since the epoch.

    Return None if this process is not in a Kaggle session or the session's start is unknown.
    """
    given = environ.get(STARTED, "")
    started = float(given) if given.isdecimal() else started
    if session(environ) is None or started is None:
        return None
    limit = environ.get(SESSION_S, "")
    return started + min(LONGEST_S, float(limit) if limit.isdecimal() else LONGEST_S)


def container_start(proc: Path = Path("/proc")) -> float | None:
    """Return when this container's first process started, in seconds since the epoch, or None if this is unknown."""
    with suppress(OSError, ValueError, StopIteration, IndexError):
        boot = next(line for line in (proc / "stat").read_text().splitlines() if line.startswith("btime "))
        ticks = (proc / "1" / "stat").read_text().rsplit(")", 1)[1].split()[19]  # proc(5): starttime, field 22
        return float(boot.split()[1]) + int(ticks) / os.sysconf("SC_CLK_TCK")
    return None
