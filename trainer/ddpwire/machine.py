"""What more than one program asks about the machine that it runs on."""

import contextlib
import os
import re
import sys
from pathlib import Path

MAX_PORT = 65535
MIG = "MIG-"  # the beginning of an instance of a GPU in CUDA_VISIBLE_DEVICES


def usable_cores() -> int:
    """Return how many cores this process may use: its affinity mask, limited by the cgroup's quota; at least 1."""
    cores = float(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):  # cgroup v2: "max 100000" or "150000 100000"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) / int(period))
    with contextlib.suppress(OSError, ValueError):  # cgroup v1: -1 is no quota
        quota_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        if quota_us > 0:
            cores = min(cores, quota_us / int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()))
    return max(1, int(cores))


def visible_devices(variable: str) -> tuple[str, ...]:
    """Return the entries that CUDA takes of CUDA_VISIBLE_DEVICES, as torch reads it.

    CUDA stops at the first invalid entry, takes none if one is there twice, and one alone of MIG instances.
    """
    by_uuid = variable.startswith(("GPU-", MIG))
    taken: list[str] = []
    for entry in variable.split(","):
        found = re.match(f"{variable[:4]}.*" if by_uuid else r"\s*\+?[0-9]+", entry)
        if found is None:
            break
        device = found[0] if by_uuid else str(int(found[0]))
        if device in taken:
            return ()
        taken.append(device)
    return tuple(taken[:1] if variable.startswith(MIG) else taken)
