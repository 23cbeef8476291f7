"""Which cores each local rank may run on: those near its GPU. It knows torchrun's modes of --numa-binding, and sysfs.

torch.numa.binding does the same for torchrun, but asks CUDA for the GPU's place, which nothing may before a fork, and
wants the numactl program. GPUs are given as their PCI addresses; a rank without one has its place by its local rank.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args

Mode = Literal["none", "node", "socket", "exclusive", "core-complex"]
MODES: tuple[Mode, ...] = get_args(Mode)
Cores = frozenset[int]
SYSFS = Path("/sys")
OPENMPS_OWN = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")  # then somebody else binds


def plan(
    mode: Mode | None,
    nproc: int,
    find_gpus: Callable[[], tuple[str, ...]],
    environ: Mapping[str, str],
    sysfs: Path = SYSFS,
) -> tuple[Cores, ...]:
    """The cores of each local rank; empty: the ranks are not bound. ``mode`` None is the default.

    By default only ranks with a GPU each are bound, to its NUMA node, and only where there are several (decision 0005).
    """
    if sys.platform != "linux" or mode == "none":
        return ()
    try:
        nodes = _numa_nodes(sysfs, frozenset(os.sched_getaffinity(0)))
        if mode is None and (len(nodes) < 2 or any(name in environ for name in OPENMPS_OWN)):
            return ()
        gpus = find_gpus()
        if mode is None and len(gpus) < nproc:
            return ()
        homes = [_home(local_rank, nproc, gpus, sorted(nodes), sysfs) for local_rank in range(nproc)]
        return tuple(_cores(mode or "node", local_rank, homes, nodes, sysfs) for local_rank in range(nproc))
    except (OSError, ValueError, LookupError):  # a machine that does not say, or a GPU whose node's cores are not ours
        return ()


def _numa_nodes(sysfs: Path, allowed: Cores) -> dict[int, Cores]:
    """The cores of each NUMA node that this process may use: a mask that somebody has set is never left."""
    found = {
        int(path.name.removeprefix("node")): parse(_read(path / "cpulist")) & allowed
        for path in sysfs.glob("devices/system/node/node[0-9]*")
    }
    return {number: cores for number, cores in found.items() if cores}


def _home(local_rank: int, nproc: int, gpus: tuple[str, ...], nodes: list[int], sysfs: Path) -> int:
    """The NUMA node of a rank: its GPU's, else the ranks are dealt out over the nodes in their order."""
    if local_rank < len(gpus):
        home = int(_read(sysfs / "bus/pci/devices" / gpus[local_rank] / "numa_node"))
        return nodes[0] if home == -1 and len(nodes) == 1 else home  # -1: the firmware does not say
    return nodes[local_rank * len(nodes) // nproc]


def _cores(mode: Mode, local_rank: int, homes: list[int], nodes: Mapping[int, Cores], sysfs: Path) -> Cores:
    home = homes[local_rank]
    cores = nodes[home]

    def topology(core: int, what: str) -> str:
        return _read(sysfs / f"devices/system/cpu/cpu{core}/{what}")

    if mode == "socket":
        socket = topology(min(cores), "topology/physical_package_id")
        same = (own for own in nodes.values() if topology(min(own), "topology/physical_package_id") == socket)
        return frozenset[int]().union(*same)
    neighbours = [rank for rank, other in enumerate(homes) if other == home]
    place = neighbours.index(local_rank)
    if mode == "core-complex":
        caches = _grouped(cores, lambda core: parse(topology(core, "cache/index3/shared_cpu_list")))
        caches.sort(key=len, reverse=True)  # the fuller ones first; of equals the first
        return caches[place % len(caches)]
    if mode == "exclusive":
        physical = _grouped(cores, lambda core: parse(topology(core, "topology/thread_siblings_list")))
        first, last = (len(physical) * edge // len(neighbours) for edge in (place, place + 1))
        if first == last:
            raise ValueError("fewer cores than ranks")
        return frozenset[int]().union(*physical[first:last])
    return cores


def _grouped(cores: Cores, key: Callable[[int], Cores]) -> list[Cores]:
    """The groups of those that share a key, in the order of their first."""
    return sorted({key(core) & cores for core in cores}, key=min)


def _read(path: Path) -> str:
    return path.read_text().strip()


def parse(ranges: str) -> Cores:
    """The cores of a list as the kernel writes it: ``0-2,5`` is 0, 1, 2, 5."""
    pairs = (part.split("-") for part in ranges.split(",") if part)
    return frozenset(core for pair in pairs for core in range(int(pair[0]), int(pair[-1]) + 1))


def written(cores: Iterable[int]) -> str:
    """``parse``, the other way."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and runs[-1][-1] == core - 1:
            runs[-1][1:] = [core]
        else:
            runs.append([core])
    return ",".join("-".join(map(str, run)) for run in runs)


def told(bound: tuple[Cores, ...]) -> str:
    """Who is bound to what, in a line."""
    return "; ".join(f"local rank {rank} to cores {written(cores)}" for rank, cores in enumerate(bound))
