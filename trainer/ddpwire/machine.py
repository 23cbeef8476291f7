"""Facts about the machine that more than one of the programs needs."""

import contextlib
import errno
import ipaddress
import os
import re
import resource
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

T = TypeVar("T")
MAX_PORT = 65535
GIB, MIB = 1 << 30, 1 << 20
INFINIBAND = Path("/sys/class/infiniband")  # has an entry for each card
INFINIBAND_DEVICES = Path("/dev/infiniband")
SHM_DIR = "/dev/shm"  # noqa: S108 (not written to)
MIN_SHM, SHM_PER_RANK = 1 * GIB, 256 * MIB
MIN_OPEN_FILES = 1024
OPEN_FILES_PER_RANK = 4  # node 0 holds the connections of all ranks to its stores
MIN_MEMLOCK = 64 * MIB  # the minimum for the queues of an InfiniBand card
MIG = "MIG-"  # how the entry of a GPU instance begins in CUDA_VISIBLE_DEVICES


def cgroups(
    controller: str, own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[Path]:
    """Yield the folder of this process's cgroup for a controller, and those of its parents, of cgroup v2 and v1.

    The last one is the root, as which a container sees its own cgroup. Some of the folders may not exist.
    """
    with contextlib.suppress(OSError):
        for _, controllers, path in (line.split(":", 2) for line in own.read_text().splitlines()):
            if controller in controllers.split(",") or not controllers:  # cgroup v1, or v2
                same = (mount for mount in root.iterdir() if {*mount.name.split(",")} == {*controllers.split(",")})
                mount, group = next(same, root / controllers), PurePosixPath(path)  # their order may differ
                yield from (mount / str(folder).lstrip("/") for folder in (group, *group.parents))


def usable_cores() -> int:
    """Return how many cores this process may use according to its affinity mask and the quotas of its cgroups.

    The result is at least 1.
    """
    cores = float(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    for folder in cgroups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # cgroup v2: "max 100000" or "150000 100000"
            quota, period = (folder / "cpu.max").read_text().split()
            cores = min(cores, int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):  # cgroup v1: -1 means no quota
            quota_us = int((folder / "cpu.cfs_quota_us").read_text())
            if quota_us > 0:
                cores = min(cores, quota_us / int((folder / "cpu.cfs_period_us").read_text()))
    return max(1, int(cores))


def visible_devices(variable: str) -> tuple[str, ...]:
    """Return the entries of CUDA_VISIBLE_DEVICES that CUDA uses, parsed as torch does.

    CUDA stops at the first invalid entry, uses no entry if one is repeated, and uses only the first MIG instance.
    """
    by_uuid = variable.startswith(("GPU-", MIG))
    taken: list[str] = []
    for entry in variable.split(","):
        match = re.match(f"{variable[:4]}.*" if by_uuid else r"\s*\+?[0-9]+", entry)
        if match is None:
            break
        device = match[0] if by_uuid else str(int(match[0]))
        if device in taken:
            return ()
        taken.append(device)
    return tuple(taken[:1] if variable.startswith(MIG) else taken)


def devices_of_rank() -> tuple[str, ...] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES that CUDA uses.

    Return None if the variable is not set, which means that all GPUs are visible.
    """
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if variable is None else visible_devices(variable)


def visible_handles(nvml: Any) -> dict[str, Callable[[], Any]]:
    """Return a function for each GPU that a rank sees, keyed by the GPU's index or UUID.

    The function returns the GPU's handle. It raises NVML's error if the GPU is lost.
    """
    visible = devices_of_rank()
    devices = tuple(map(str, range(nvml.nvmlDeviceGetCount()))) if visible is None else visible
    return {
        device: partial(nvml.nvmlDeviceGetHandleByIndex, int(device))
        if device.isdecimal()
        else partial(nvml.nvmlDeviceGetHandleByUUID, device)
        for device in devices
    }


def format_ranges(numbers: Iterable[int]) -> str:
    """Format whole numbers as ``0-2,5``, the kernel's format for lists of cores."""
    return ",".join("-".join(map(str, dict.fromkeys(ends))) for ends in _ranges(numbers))


def enumerate_ranges(numbers: Iterable[int]) -> str:
    """Format whole numbers for a sentence, as ``0, 2, 3 and 5 to 7``."""
    parts: list[str] = []
    for first, last in _ranges(numbers):
        parts += [f"{first} to {last}"] if last - first > 1 else map(str, range(first, last + 1))
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last number of each range of consecutive numbers."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges


def format_free(num_bytes: int) -> str:
    """Format free space in GiB, rounded down: a disk with less than the 10 GiB that are needed does not show 10.0."""
    return f"{num_bytes * 10 // GIB / 10:.1f} GiB"


def resource_limit(which: int) -> int | None:
    """Return a soft limit of this process, or None if it is unlimited."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def has_infiniband() -> bool:
    """Return whether this machine has an InfiniBand card."""
    return any(INFINIBAND.glob("*"))


def infiniband_error() -> str:
    """Return why NCCL cannot use the machine's InfiniBand cards. Return an empty text if it can, or if there are none.

    A container sees all cards in /sys, but only those devices that its runtime has given to it.
    """
    from ctypes.util import find_library  # starts a process

    if has_infiniband() and not any(os.access(path, os.R_OK | os.W_OK) for path in INFINIBAND_DEVICES.glob("uverbs*")):
        return f"the machine has InfiniBand, but no device in {INFINIBAND_DEVICES} can be opened"
    return "libibverbs is not installed" if has_infiniband() and not find_library("ibverbs") else ""


def shm_bytes() -> int | None:
    """Return the size of /dev/shm in bytes, or None if it does not exist or has no limit."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(SHM_DIR).total or None
    return None


def call_with_timeout(call: Callable[[], T], timeout_s: float, *, thread: str) -> T:
    """Return the result of ``call``, which runs in a daemon thread. Raises its error, or TimeoutError.

    After a time-out, the thread goes on, because no call can be interrupted.
    """
    from concurrent.futures import Future  # starts slowly, because it imports logging

    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, name=thread, daemon=True).start()
    return result.result(timeout_s)


def resolve(host: str, *, timeout_s: float) -> str:
    """Return the address of ``host``. Raises OSError, or TimeoutError if no answer comes within ``timeout_s``."""
    ask = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    try:
        return str(call_with_timeout(ask, timeout_s, thread="resolver")[0][4][0])
    except TimeoutError:
        raise TimeoutError(errno.ETIMEDOUT, "the name server does not answer") from None
    except UnicodeError:  # a part of the name is empty or too long
        raise socket.gaierror(socket.EAI_NONAME, "not a name of a host") from None


def source_address(address: str) -> str:
    """Return this machine's own address on the route to ``address``. Raises OSError if there is no route."""
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # this sends nothing and only selects the route
        return str(probe.getsockname()[0])
