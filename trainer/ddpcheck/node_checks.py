"""What a node checks about itself: limits, its disk, interfaces, loaded libraries, and the speed of a core."""

import contextlib
import ctypes
import hashlib
import ipaddress
import math
import os
import re
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch

from ddpcheck.finding import Finding, Status
from ddpwire import machine, names
from ddpwire.machine import GIB, MIB, SHM_DIR

BAD_SHM = 64 * MIB  # Docker's default
BAD_DISK, LITTLE_DISK = 64 * MIB, 2 * GIB
DISK_BYTES, DISK_S, DISK_LIMIT_S = 8 * MIB, 1.0, 15.0  # to write, and for how long; for the disk to answer at all
SLOW_DISK = 10e6  # bytes a second
LIBRARY = re.compile(r"(/\S*/(lib(?:[nr]ccl|torch_(?:cpu|cuda|hip)|c10|c10_cuda|cudart)\.so[^/ ]*))( \(deleted\))?$")
CPU_WINDOWS, CPU_WINDOW_S = 3, 0.3  # longer than the period of a CPU quota, 0.1 s
CPU_MATRIX, COPY_BYTES, COPIES = 256, 32 * MIB, 5
MIN_CORE_SHARE = 0.75


def check_limits(*, num_gpus: int, num_nodes: int) -> Iterator[Finding]:
    """Check the limits of shared memory, locked memory and open files. ddprun's preflight expects the same."""
    shm, wanted = machine.shm_bytes(), max(machine.MIN_SHM, num_gpus * machine.SHM_PER_RANK)
    if shm is None:
        exists = Path(SHM_DIR).is_dir()
        yield Finding(SHM_DIR, "ok" if exists else "not looked at", "no limit" if exists else "it does not exist")
    else:
        yield Finding(SHM_DIR, "bad" if shm < BAD_SHM else "warning" if shm < wanted else "ok", f"{shm // MIB} MiB")
    locked = machine.resource_limit(resource.RLIMIT_MEMLOCK)
    uses_infiniband = num_gpus > 0 and num_nodes > 1 and machine.has_infiniband()
    few = uses_infiniband and locked is not None and locked < machine.MIN_MEMLOCK
    value = "unlimited" if locked is None else f"{locked // 1024} KiB"
    yield Finding("memlock", "warning" if few else "ok", value)
    if uses_infiniband:
        error = machine.infiniband_error()
        yield Finding("InfiniBand", "warning" if error else "ok", error or "can be opened")
    files, need = machine.resource_limit(resource.RLIMIT_NOFILE), num_gpus * num_nodes * machine.OPEN_FILES_PER_RANK
    short = files is not None and files < need
    bad = files is not None and files < machine.MIN_OPEN_FILES
    yield Finding("open files", "bad" if bad else "warning" if short else "ok", str(files or "unlimited"))


def check_disk(environ: Mapping[str, str]) -> Finding:
    """Check the disk of the checkpoints: its free space, and the speed at which up to 8 MiB are written.

    Bad: less than 64 MiB are free, or a file cannot be written within 15 s. Warning: less than 2 GiB are free, or the
    speed is less than 10 MB/s. A low speed alone gives only a warning, because even a healthy disk is slow while it is
    busy.
    """
    wanted = Path(environ.get(names.CHECKPOINT_DIR) or environ.get(names.RUN_DIR) or Path.cwd())
    folder = next(path for path in (wanted, *wanted.absolute().parents) if path.is_dir())
    try:
        free, speed = machine.call_with_timeout(partial(_try_disk, folder), DISK_LIMIT_S, thread="disk")
    except TimeoutError:
        return Finding("disk", "bad", f"{folder}: no answer within {DISK_LIMIT_S:g} s")
    except OSError as error:
        return Finding("disk", "bad", f"{folder}: {error.strerror}")
    little = (free is not None and free < LITTLE_DISK) or speed < SLOW_DISK
    space = "free space unknown" if free is None else f"{machine.format_free(free)} free"
    bad = free is not None and free < BAD_DISK
    return Finding(
        "disk", "bad" if bad else "warning" if little else "ok", f"{folder}: {space}, {int(speed / 1e6)} MB/s"
    )


def _try_disk(folder: Path) -> tuple[int | None, float]:
    """Return the free bytes (None: unknown), and the bytes that are written in a second. Raises OSError."""
    status, block, written, began = os.statvfs(folder), bytes(MIB), 0, time.monotonic()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        while written < DISK_BYTES and time.monotonic() < began + DISK_S:
            written += file.write(block)
        os.fsync(file.fileno())
    free = status.f_bavail * status.f_frsize if status.f_blocks else None  # some FUSE file systems report no blocks
    return free, written / max(time.monotonic() - began, 1e-6)


def check_interfaces(address: str) -> Finding:
    """Check the interfaces. Warning: two of them share a subnet, or only some InfiniBand ports are active."""
    states = psutil.net_if_stats()
    subnets: dict[str, set[str]] = {}
    for name, owned in psutil.net_if_addrs().items():
        for interface_address in owned:
            up = name in states and states[name].isup and not interface_address.address.startswith("127.")
            if interface_address.family == socket.AF_INET and interface_address.netmask and up:
                network = ipaddress.ip_interface(f"{interface_address.address}/{interface_address.netmask}").network
                subnets.setdefault(str(network), set()).add(name)
    warnings = [
        f"{' and '.join(sorted(interfaces))} are in {net}" for net, interfaces in subnets.items() if len(interfaces) > 1
    ]
    files = sorted(machine.INFINIBAND.glob("*/ports/*/state"))  # "4: ACTIVE"
    ports = {f"{path.parts[-4]}:{path.parts[-2]}": path.read_text().split()[-1] for path in files}
    warnings += [
        f"{port} is {state}" for port, state in ports.items() if state != "ACTIVE" and "ACTIVE" in ports.values()
    ]
    interface, mtu = interface_of(address)
    return Finding("interfaces", "warning" if warnings else "ok", "; ".join((f"{interface}, MTU {mtu}", *warnings)))


def interface_of(address: str) -> tuple[str, int]:
    """Return the interface that has ``address``, and its MTU, or "unknown" and 0 if there is none."""
    for name, owned in psutil.net_if_addrs().items():
        if any(interface_address.address.partition("%")[0] == address for interface_address in owned):
            stats = psutil.net_if_stats().get(name)
            return name, stats.mtu if stats else 0
    return "unknown", 0


def check_containers(environ: Mapping[str, str], *, num_gpus: int) -> Finding:
    """Check which container runtimes the node has. The check warns if containers cannot use the node's GPUs."""
    inside = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
    if inside or "KUBERNETES_SERVICE_HOST" in environ:
        return Finding("container runtime", "not looked at", "this is inside a container")
    runtimes = [name for name in ("docker", "podman", "apptainer", "enroot") if shutil.which(name)]
    toolkit = [name for name in ("nvidia-ctk", "nvidia-container-cli") if shutil.which(name)][:1]
    missing = num_gpus > 0 and not toolkit and not {"docker", "podman"}.isdisjoint(runtimes)
    return Finding("container runtime", "warning" if missing else "ok", ", ".join(runtimes + toolkit) or "none")


def mapped_libraries(maps: Path = Path("/proc/self/maps")) -> dict[str, str]:
    """Return torch's version, and the sha256 of each library of torch and NCCL that this process has loaded.

    The version of NCCL is read from the loaded library. It may differ from the version of the installed package, and
    from the version with which torch was built.
    """
    versions = {"torch": str(torch.__version__)} | ({"CUDA": torch.version.cuda} if torch.version.cuda else {})
    lines = maps.read_text().splitlines()
    for name, match in sorted({match[2]: match for line in lines if (match := LIBRARY.search(line))}.items()):
        versions[name] = "replaced on the disk since it was loaded"
        if not match[3]:
            with open(match[1], "rb") as file:  # noqa: PTH123 -- the path as the kernel gives it
                versions[name] = hashlib.file_digest(file, "sha256").hexdigest()
            if name.startswith("libnccl"):
                version = ctypes.c_int()
                ctypes.CDLL(match[1]).ncclGetVersion(ctypes.byref(version))
                versions["NCCL"] = f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"
    return versions


@dataclass(frozen=True, kw_only=True)
class CpuSpeed:
    """The speed of one thread: the best of several time windows, so that a short load has no effect."""

    gflops: float  # per second of CPU time, with float32 matrices
    copy_bytes: float  # read and written per second of CPU time
    share: float  # the share of a core that the thread got
    idle: float  # idle cores meanwhile, of those that this process may use
    others: float  # cores that other programs used meanwhile
    throttled: float  # cores that CPU quotas withheld meanwhile from the thread's cgroup and its parents


def measure_cpu() -> CpuSpeed:
    """Measure the speed of one thread for about a second."""
    torch.set_num_threads(1)
    matrix, source = torch.rand(CPU_MATRIX, CPU_MATRIX), torch.zeros(COPY_BYTES, dtype=torch.uint8)
    copy, start, throttled = source.clone(), time.monotonic(), throttled_s()
    windows, copies = [], []
    for _ in range(CPU_WINDOWS):
        busy, idle = _core_seconds()
        began, cpu, count = time.monotonic(), time.thread_time(), 0
        while time.monotonic() < began + CPU_WINDOW_S:
            torch.mm(matrix, matrix)
            count += 1
        wall, own = time.monotonic() - began, max(time.thread_time() - cpu, 1e-6)
        busy_after, idle_after = _core_seconds()
        windows.append((own / wall, count / own, (idle_after - idle) / wall, (busy_after - busy - own) / wall))
    for _ in range(COPIES):
        cpu = time.thread_time()
        copy.copy_(source)
        copies.append(time.thread_time() - cpu)
    share, _, idle, others = max(windows)
    return CpuSpeed(
        gflops=2 * CPU_MATRIX**3 * max(window[1] for window in windows) / 1e9,
        copy_bytes=2 * COPY_BYTES / max(min(copies), 1e-6),
        share=min(share, 1.0),
        idle=idle,
        others=max(others, 0.0),
        throttled=(throttled_s() - throttled) / (time.monotonic() - start),
    )


def throttled_s(**places: Path) -> float:
    """Return how long CPU quotas have stopped this process's cgroup and the parents of the cgroup, summed over cores.

    Return 0 if the time is unknown. ``places`` are those of ``machine.cgroups``.
    https://docs.kernel.org/scheduler/sched-bwc.html
    """
    seconds = 0.0  # the kernel counts each group's own quota
    for folder in machine.cgroups("cpu", **places):
        with contextlib.suppress(OSError):
            text = (folder / "cpu.stat").read_text()
            for unit, value in re.findall(r"^throttled_(usec|time) (\d+)$", text, re.MULTILINE):
                seconds += int(value) / (1e6 if unit == "usec" else 1e9)  # cgroup v2, or v1
    return seconds


def _core_seconds() -> tuple[float, float]:
    times = psutil.cpu_times(percpu=True)
    cores = [times[core] for core in os.sched_getaffinity(0) if core < len(times)]
    idle = sum(core.idle + core.iowait for core in cores)
    return sum(sum(core[:8]) for core in cores) - idle, idle  # without guest, which is in user


def check_cpu(speed: CpuSpeed) -> Finding:
    """Check whether a thread that needs a whole core gets it.

    Bad: the thread gets less than 75 % of a core, and quotas explain at least half of the rest, or a whole core is idle
    meanwhile. The latter is a quota that is not visible here, such as that of a pod. Warning: the thread gets less than
    75 % because other programs use the cores. On a single core, a quota that is not visible here is also a warning.
    """
    cause = f"; others use {speed.others:.1f} cores"
    status: Status = "ok" if speed.share >= MIN_CORE_SHARE else "warning"
    if status == "warning" and speed.throttled >= (1 - speed.share) / 2:
        status, cause = "bad", ", limited by a quota"
    elif status == "warning" and speed.idle >= 1:
        status, cause = "bad", f", and meanwhile {speed.idle:.1f} cores are idle"
    return Finding("CPU", status, f"a thread gets {math.floor(100 * speed.share)} % of a core{cause}")
