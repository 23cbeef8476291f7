"""What of this machine each rank of this node gets: threads, and cores to be bound to. Decided before the fork."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddprun import affinity, health, machine
from ddprun.contract import Contract
from ddpwire import names


@dataclass(frozen=True, kw_only=True)
class Share:
    """By local rank."""

    threads: int  # OMP_NUM_THREADS, the same for all: they are forked from one process, whose libraries have read it
    bound: tuple[affinity.Cores, ...]  # empty: a rank may run wherever this node may

    def cores(self, local_rank: int) -> affinity.Cores:
        """Those that the rank is bound to; none: it is not."""
        return self.bound[local_rank] if self.bound else frozenset()


def share(contract: Contract, environ: Mapping[str, str], sysfs: Path = affinity.SYSFS) -> Share:
    """The cgroup's quota and the affinity mask, dealt out evenly."""
    threads = machine.usable_cores() // contract.nodes_here // contract.nproc
    is_on_gpus = environ.get(names.DEVICE) != "cpu"
    bound: tuple[affinity.Cores, ...] = ()
    if contract.nodes_here == 1:  # else other nodes' ranks would be bound to the same cores
        find_gpus = health.pci_addresses if is_on_gpus else tuple
        bound = affinity.plan(contract.numa_binding, contract.nproc, find_gpus, environ, sysfs)
    return Share(threads=max(1, min([threads, *map(len, bound)])), bound=bound)


def told(contract: Contract, share: Share) -> str:
    """A line for a person; empty where there is nothing to tell."""
    asked = contract.numa_binding
    if share.bound:
        return affinity.told(share.bound)
    if asked in (None, "none"):
        return ""
    why = "there are fewer cores than ranks, or this machine does not tell its NUMA nodes"
    if contract.nodes_here > 1:
        why = f"{contract.nodes_here} nodes share this machine's cores"
    return f"--numa-binding {asked} changes nothing here: {why}"
