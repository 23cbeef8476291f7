"""What this machine has: cores that may be used, GPUs. It knows nothing of runs; never torch."""

import contextlib
import ipaddress
import os
import sys
from pathlib import Path


def usable_cores() -> int:
    """Cores that this process may use: its affinity, cut by the cgroup's quota; at least 1."""
    cores = float(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):  # cgroup v2: "max 100000" or "150000 100000"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) / int(period))
    with contextlib.suppress(OSError, ValueError):  # cgroup v1: -1 is no quota
        quota_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        if quota_us > 0:
            cores = min(cores, quota_us / int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()))
    return max(1, int(cores))


def gpus() -> int:
    """GPUs that a rank would see, by NVML and CUDA_VISIBLE_DEVICES; 0 where there is no driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    try:
        import pynvml

        pynvml.nvmlInit()
        count: int = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except Exception:  # no driver, or no library: NVML has an error for each
        return 0
    return count


def is_loopback(host: str) -> bool:
    """Whether ``host`` is an address of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
