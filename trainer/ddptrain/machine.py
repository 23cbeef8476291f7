"""The memory that this process may use, on a GPU or a CPU."""

from pathlib import Path

import torch

MB = 1e6


def free_bytes(device: torch.device) -> float:
    """Return the free bytes of a GPU or, for a CPU, of the machine or of the container, whichever has less."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return float("inf")  # not Linux
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = (Path("/sys/fs/cgroup", name).read_text().strip() for name in (limit, used))
            return free if most == "max" else min(free, float(most) - float(now))
        except OSError:
            continue
    return free


def format_bytes(num_bytes: float) -> str:
    """Return a size with its unit, for messages."""
    return f"{num_bytes / MB:.1f} MB" if num_bytes < 1000 * MB else f"{num_bytes / MB / 1000:,.1f} GB"
