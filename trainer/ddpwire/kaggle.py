"""What is known of a Kaggle session: that this is one, where its folders are, when it ends.

Kaggle sets KAGGLE_KERNEL_RUN_TYPE in every session. A session that reaches its end is cut off and keeps no output, so
that ranks have to save, and the notebook has to end, well before.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

RUN_TYPE: Final = "KAGGLE_KERNEL_RUN_TYPE"  # Kaggle's own: Interactive, or Batch for a version that is saved and run
INPUT_FOLDER: Final = "/kaggle/input"
WORKING_FOLDER: Final = "/kaggle/working"
INPUT: Final = "DDP_KAGGLE_INPUT"  # other folders than Kaggle's own
WORKING: Final = "DDP_KAGGLE_WORKING"
SESSION_S: Final = "DDP_KAGGLE_SESSION_S"  # a shorter session than Kaggle's longest
STARTED: Final = "DDP_KAGGLE_STARTED"  # seconds since the epoch, where the session is younger than its container

RUNS: Final = "runs"  # in the working folder: the runs' folders
LONGEST_S: Final = 12 * 3600.0  # https://www.kaggle.com/docs/notebooks: 12 hours with or without a GPU
MARGIN_S: Final = 600.0  # from the last rank's end to the session's: the notebook ends, Kaggle stores its output
# Two GPUs on PCIe in a virtual machine, where peer access may be announced and hang: through the host's memory, and no
# search for InfiniBand.
NCCL: Final = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


@dataclass(frozen=True, kw_only=True)
class Session:
    """A Kaggle session."""

    input: Path  # data sets and other notebooks' outputs, read-only
    working: Path  # what is written here is the version's output
    batch: bool  # nobody looks on


def session(environ: Mapping[str, str]) -> Session | None:
    """The session that this process is in; None: this is not Kaggle."""
    if not environ.get(RUN_TYPE):
        return None
    return Session(
        input=Path(environ.get(INPUT) or INPUT_FOLDER),
        working=Path(environ.get(WORKING) or WORKING_FOLDER),
        batch=environ[RUN_TYPE] == "Batch",
    )


def ends_at(environ: Mapping[str, str], *, started: float | None) -> float | None:
    """When the session is cut off, in seconds since the epoch; None: not Kaggle, or its start is not known."""
    given = environ.get(STARTED, "")
    started = float(given) if given.isdecimal() else started
    if session(environ) is None or started is None:
        return None
    limit = environ.get(SESSION_S, "")
    return started + min(LONGEST_S, float(limit) if limit.isdecimal() else LONGEST_S)


def container_start(proc: Path = Path("/proc")) -> float | None:
    """When this container's first process was started, in seconds since the epoch; None: the kernel does not say."""
    with suppress(OSError, ValueError, StopIteration, IndexError):
        boot = next(line for line in (proc / "stat").read_text().splitlines() if line.startswith("btime "))
        ticks = (proc / "1" / "stat").read_text().rsplit(")", 1)[1].split()[19]  # proc(5): starttime, the 22nd
        return float(boot.split()[1]) + int(ticks) / os.sysconf("SC_CLK_TCK")
    return None
