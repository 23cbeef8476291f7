"""The machine of this node: its GPUs, the cores for each rank, and limits that may harm a training.

This module never imports torch, because CUDA must not be initialized before ddprun forks.
"""

import contextlib
import ipaddress
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from ddpwire.machine import (
    MIB,
    MIN_MEMLOCK,
    MIN_OPEN_FILES,
    MIN_SHM,
    OPEN_FILES_PER_RANK,
    SHM_DIR,
    SHM_PER_RANK,
    devices_of_rank,
    has_infiniband,
    infiniband_error,
    resource_limit,
    shm_bytes,
    visible_handles,
)

BindingMode = Literal["none", "node", "socket", "exclusive", "core-complex"]
BINDING_MODES: tuple[BindingMode, ...] = get_args(BindingMode)
Cores = frozenset[int]
T = TypeVar("T")
SYSFS = Path("/sys")
OPENMP_BINDING = {"OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}  # variables


def ask_nvml(ask: Callable[[Any], T], otherwise: T) -> T:
    """Call ``ask`` with the module pynvml and return the result, or ``otherwise`` if NVML is missing or fails."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return ask(pynvml)
        finally:
            pynvml.nvmlShutdown()  # because ddprun may still fork
    except Exception:  # no driver, no library, an old driver: NVML has an error for each
        return otherwise


def count_gpus() -> int:
    """Return how many GPUs a rank sees. Without NVML, count the entries of CUDA_VISIBLE_DEVICES."""
    visible = devices_of_rank()
    count = ask_nvml(lambda nvml: int(nvml.nvmlDeviceGetCount()), None)
    if count is None or visible is None:
        return len(visible or ()) if count is None else count
    absent = (place for place, device in enumerate(visible) if device.isdecimal() and int(device) >= count)
    return next(absent, len(visible))


DEBIAN_ADDRESS = "127.0.1.1"  # of the machine's own name in Debian's /etc/hosts


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address, which other machines cannot reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def plan_affinity(
    mode: BindingMode | None,
    local_world_size: int,
    find_gpus: Callable[[], tuple[str, ...]],
    environ: Mapping[str, str],
    sysfs: Path = SYSFS,
) -> tuple[Cores, ...]:
    """Return the cores that each local rank may run on, or an empty tuple if the ranks are not bound.

    ``mode`` is a mode of torchrun's --numa-binding. torch's code is not used, because it needs the program numactl and
    asks CUDA for the GPU's address, which ddprun must not do before a fork. ``find_gpus`` returns PCI addresses. A rank
    with several GPUs gets the cores near each of them. Ranks without GPUs are spread over the NUMA nodes.

    By default (None), ranks are bound only if these conditions hold (decision 0005):

    * The machine has several NUMA nodes.
    * No OpenMP variable binds the threads.
    * Each rank has one GPU, or a single rank has all GPUs.
    """
    if sys.platform != "linux" or mode == "none":
        return ()
    try:
        allowed = frozenset(os.sched_getaffinity(0))
        nodes = {
            int(path.name.removeprefix("node")): cores
            for path in sysfs.glob("devices/system/node/node[0-9]*")
            if (cores := parse_cpu_list(_read_sysfs(path / "cpulist")) & allowed)
        }
        if mode is None and (len(nodes) < 2 or OPENMP_BINDING & {*environ}):
            return ()
        gpus = find_gpus()
        if mode is None and (not gpus or local_world_size not in (1, len(gpus))):
            return ()
        ranks = range(local_world_size)
        homes = [_numa_homes(rank, local_world_size, gpus, sorted(nodes), sysfs) for rank in ranks]
        return tuple(_rank_cores(mode or "node", rank, homes, nodes, sysfs) for rank in ranks)
    except (OSError, ValueError, LookupError):  # unknown topology, or no core near a GPU may be used
        return ()


def _numa_homes(
    local_rank: int, local_world_size: int, gpus: tuple[str, ...], nodes: list[int], sysfs: Path
) -> frozenset[int]:
    """Return the NUMA nodes of a rank's GPUs. Without GPUs, spread the ranks evenly over the NUMA nodes.

    If the number of ranks r divides the number of GPUs g, rank k has g / r GPUs, starting with GPU k * g / r. Otherwise
    rank k has GPU k.
    """
    share = len(gpus) // local_world_size if len(gpus) % local_world_size == 0 else 1
    if not (own := gpus[local_rank * share : (local_rank + 1) * share]):
        return frozenset({nodes[local_rank * len(nodes) // local_world_size]})
    homes = frozenset(int(_read_sysfs(sysfs / "bus/pci/devices" / gpu / "numa_node")) for gpu in own)
    return frozenset(nodes) if homes == {-1} and len(nodes) == 1 else homes  # -1: unknown to the firmware


def _rank_cores(
    mode: BindingMode, local_rank: int, homes: list[frozenset[int]], nodes: Mapping[int, Cores], sysfs: Path
) -> Cores:
    home = homes[local_rank]
    cores = frozenset[int]().union(*(nodes[number] for number in home))

    def topology(core: int, name: str) -> str:
        return _read_sysfs(sysfs / f"devices/system/cpu/cpu{core}/{name}")

    if mode == "socket":
        sockets = {number: topology(min(own), "topology/physical_package_id") for number, own in nodes.items()}
        wanted = {sockets[number] for number in home}
        return frozenset[int]().union(*(own for number, own in nodes.items() if sockets[number] in wanted))
    neighbours = [rank for rank, other in enumerate(homes) if other & home]
    place = neighbours.index(local_rank)
    if mode == "core-complex":
        caches = _group_cores(cores, lambda core: parse_cpu_list(topology(core, "cache/index3/shared_cpu_list")))
        caches.sort(key=len, reverse=True)  # the largest first; the sort is stable
        return caches[place % len(caches)]
    if mode == "exclusive":
        if any(homes[rank] != home for rank in neighbours):
            raise ValueError("ranks share some of their NUMA nodes, and not all")
        physical = _group_cores(cores, lambda core: parse_cpu_list(topology(core, "topology/thread_siblings_list")))
        first, last = (len(physical) * edge // len(neighbours) for edge in (place, place + 1))
        if first == last:
            raise ValueError("fewer cores than ranks")
        return frozenset[int]().union(*physical[first:last])
    return cores


def _group_cores(cores: Cores, key: Callable[[int], Cores]) -> list[Cores]:
    """Return the groups of cores that have the same key, ordered by their first core."""
    return sorted({key(core) & cores for core in cores}, key=min)


def _read_sysfs(path: Path) -> str:
    return path.read_text().strip()


def parse_cpu_list(ranges: str) -> Cores:
    """Parse a list in the kernel's format, such as ``0-2,5`` for the cores 0, 1, 2 and 5."""
    pairs = (part.split("-") for part in ranges.split(",") if part)
    return frozenset(core for pair in pairs for core in range(int(pair[0]), int(pair[-1]) + 1))


def health_warnings(num_gpus: int, *, local_world_size: int, num_nodes: int, device: str) -> Iterator[str]:
    """Yield a warning for each limit of this machine that is likely to harm the training, and for each bad GPU."""
    shm, wanted = shm_bytes(), max(MIN_SHM, local_world_size * SHM_PER_RANK)
    if shm is not None and shm < wanted:
        yield (
            f"{SHM_DIR} has only {shm // MIB} MiB, and DataLoader workers die when it is full: "
            f"give it {wanted // MIB} MiB for {local_world_size} rank{'s' * (local_world_size > 1)} "
            f"(docker run --shm-size, or in Kubernetes an emptyDir with medium: Memory)"
        )
    files = resource_limit(resource.RLIMIT_NOFILE)
    needed = max(MIN_OPEN_FILES, local_world_size * num_nodes * OPEN_FILES_PER_RANK)
    if files is not None and files < needed:
        yield f"the limit for open files is {files}, but {needed} may be needed: set ulimit -n {needed}"
    if num_gpus and num_nodes > 1 and has_infiniband():
        if error := infiniband_error():
            yield f"{error}, so NCCL uses TCP instead of InfiniBand: give /dev/infiniband to the container"
        locked = resource_limit(resource.RLIMIT_MEMLOCK)
        if locked is not None and locked < MIN_MEMLOCK:
            yield (
                f"only {locked // 1024} KiB of memory can be locked, so NCCL uses TCP instead of InfiniBand: "
                "set ulimit -l unlimited before the container starts"
            )
    if device == "cuda" and num_gpus < local_world_size:
        gpus = f"{num_gpus} GPU{'s' * (num_gpus != 1)}"
        yield (
            f"this node has {local_world_size} CUDA ranks, but {gpus}: each rank needs a GPU of its own, unless the "
            "script makes ranks share a GPU"
        )
    problems: tuple[str, ...] = ask_nvml(_gpu_problems, ()) if num_gpus else ()
    yield from problems


def driver_version() -> str | None:
    """Return the version of the GPU driver, or None if there is none."""
    return ask_nvml(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()), None)


def _gpu_problems(nvml: Any) -> tuple[str, ...]:
    """Return a warning for each problem of the GPUs that a rank sees. What cannot be read is left out."""
    problems = []
    for device, get_handle in visible_handles(nvml).items():
        try:
            handle = get_handle()
        except nvml.NVMLError as error:
            problems.append(f"GPU {device} cannot be read: {error} (see nvidia-smi, and dmesg for its Xid errors)")
            continue
        with contextlib.suppress(nvml.NVMLError):
            gpu, kind = f"GPU {nvml.nvmlDeviceGetIndex(handle)}", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
            with contextlib.suppress(nvml.NVMLError):  # a card without ECC
                if errors := nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC):
                    problems.append(f"{gpu} has had {errors} uncorrected ECC errors: see nvidia-smi -q -d ECC")
            if pids := [str(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]:
                problems.append(f"{gpu} is also used by other processes: pid {', '.join(pids)}")
    return tuple(problems)


def pci_addresses() -> tuple[str, ...]:
    """Return the GPUs' PCI addresses, as in /sys/bus/pci/devices, or an empty tuple if a GPU is lost."""

    def ask(nvml: Any) -> tuple[str, ...]:
        handles = [get_handle() for get_handle in visible_handles(nvml).values()]
        return tuple(pci_address(nvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles)

    return ask_nvml(ask, ())


def pci_address(bus_id: str) -> str:
    """Convert a PCI address from NVML's format (00000000:3B:00.0) to the kernel's (0000:3b:00.0)."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"
