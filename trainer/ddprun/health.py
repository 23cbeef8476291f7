"""What of this machine may spoil a training later: limits, shared memory, GPUs. Each is a line, none stops the run."""

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GIB, MIB = 1 << 30, 1 << 20
SHM_FOLDER = "/dev/shm"  # noqa: S108 (not written to)
SHM, SHM_A_RANK = 1 * GIB, 256 * MIB
OPEN_FILES = 1024
OPEN_FILES_A_RANK = 4  # node 0 holds the connections of all ranks to its stores
MEMLOCK = 64 * MIB  # what an InfiniBand card's queues need at the least


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as NVML tells of it."""

    index: int
    ecc_errors: int  # uncorrected ones since the driver was loaded
    pids: tuple[int, ...]  # of processes that compute on it


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was read. None: it does not exist here."""

    shm_bytes: int | None
    memlock_bytes: int | None  # None: unlimited
    open_files: int | None  # None: unlimited
    num_gpus: int
    gpus: tuple[Gpu, ...] = ()


def warnings(machine: Machine, *, nproc: int, num_nodes: int, device: str) -> tuple[str, ...]:
    """A line for each thing that is likely to hurt. Pure."""
    return tuple(_warnings(machine, nproc, num_nodes, device))


def _warnings(machine: Machine, nproc: int, num_nodes: int, device: str) -> Iterator[str]:
    shm = max(SHM, nproc * SHM_A_RANK)
    if machine.shm_bytes is not None and machine.shm_bytes < shm:
        yield (
            f"{SHM_FOLDER} has {machine.shm_bytes // MIB} MiB, and DataLoader workers die when it is full: "
            f"{shm // MIB} MiB is right for {nproc} rank{'s' * (nproc > 1)} "
            f"(docker run --shm-size, or in Kubernetes an emptyDir with medium: Memory)"
        )
    open_files = max(OPEN_FILES, nproc * num_nodes * OPEN_FILES_A_RANK)
    if machine.open_files is not None and machine.open_files < open_files:
        yield f"{machine.open_files} open files are allowed, {open_files} may be needed: ulimit -n {open_files}"
    if machine.num_gpus and num_nodes > 1 and machine.memlock_bytes is not None and machine.memlock_bytes < MEMLOCK:
        yield (
            f"{machine.memlock_bytes // 1024} KiB may be locked in memory, and without more NCCL leaves InfiniBand "
            f"for TCP: ulimit -l unlimited, before the container starts"
        )
    if device == "cuda" and machine.num_gpus < nproc:
        gpus = f"{machine.num_gpus} GPU{'s' * (machine.num_gpus != 1)}"
        yield f"{nproc} ranks on CUDA, but {gpus}: ranks will share, or fail"
    for gpu in machine.gpus:
        if gpu.ecc_errors:
            yield f"GPU {gpu.index} has had {gpu.ecc_errors} uncorrected ECC errors: see nvidia-smi -q -d ECC"
        if gpu.pids:
            yield f"GPU {gpu.index} is used by others too: pid {', '.join(map(str, gpu.pids))}"


def read(num_gpus: int) -> Machine:
    """The state of this machine, now."""
    shm = None
    with contextlib.suppress(OSError):
        status = os.statvfs(SHM_FOLDER)
        shm = status.f_blocks * status.f_frsize
    return Machine(
        shm_bytes=shm,
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        num_gpus=num_gpus,
        gpus=_gpus() if num_gpus else (),
    )


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def driver_version() -> str | None:
    """Of the GPUs' driver; None: there is none."""
    with contextlib.suppress(Exception):  # no driver, no library, an old driver: NVML has an error for each
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None


def _gpus() -> tuple[Gpu, ...]:
    """The GPUs that a rank would see; none where NVML does not tell all of it."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return tuple(_gpu(pynvml, handle) for handle in _handles(pynvml))
    return ()


def pci_addresses() -> tuple[str, ...]:
    """Of the GPUs that ranks would see, as /sys/bus/pci/devices names them; none where NVML does not tell of all."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        try:
            found = [pynvml.nvmlDeviceGetPciInfo(handle).busId for handle in _handles(pynvml)]
        finally:
            pynvml.nvmlShutdown()  # ddprun may still be going to fork
        return tuple(pci_address(bus_id.decode() if isinstance(bus_id, bytes) else bus_id) for bus_id in found)
    return ()


def pci_address(bus_id: str) -> str:
    """NVML's 00000000:3B:00.0 as the kernel writes it, 0000:3b:00.0."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _handles(nvml: Any) -> list[Any]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    devices = [device.strip() for device in visible.split(",")]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(device)) if device.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(device)
        for device in devices
        if device not in ("", "-1")
    ]


def _gpu(nvml: Any, handle: Any) -> Gpu:
    ecc_errors = 0
    with contextlib.suppress(nvml.NVMLError):  # a card without ECC
        ecc_errors = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    return Gpu(
        index=nvml.nvmlDeviceGetIndex(handle),
        ecc_errors=ecc_errors,
        pids=tuple(process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    )
