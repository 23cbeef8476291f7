"""The ranks of a check: their nodes, their devices, and how they meet."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddpwire import names

TIMEOUT_S = 180.0  # for one operation of the process groups


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What one rank knows about all ranks. ``nodes`` and ``hosts`` have one entry for each rank."""

    rank: int
    device: torch.device
    nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    group: Any  # the process group to measure: NCCL's, or the default group, which uses gloo

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.nodes)

    def gather(self, value: Any) -> list[Any]:
        """Collect ``value`` from all ranks. Every rank returns the list of these values, in the order of the ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def slowest(self, seconds: float) -> float:
        """Return the longest of the ranks' times."""
        longest = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return float(longest)

    def barrier(self) -> None:
        """Wait until every rank has called this method and has no work left on its GPU."""
        self.synchronize()
        dist.barrier()

    def synchronize(self) -> None:
        """Wait until this rank's GPU has no work left."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def node_name(self, rank: int) -> str:
        """Return ``node 2 (box3)``, or only ``node 2`` if several nodes share the host."""
        node, host = self.nodes[rank], self.hosts[rank]
        alone = {other for other, name in zip(self.nodes, self.hosts, strict=True) if name == host} == {node}
        return f"node {node} ({host})" if alone else f"node {node}"


def join() -> Ranks:
    """Meet the other ranks at MASTER_ADDR. Use NCCL if every rank has its own GPU, and otherwise gloo."""
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", timeout=timeout)
    local_rank, node = (int(os.environ.get(name, "0")) for name in (names.LOCAL_RANK, names.GROUP_RANK))
    num_gpus = 0 if os.environ.get(names.DEVICE) == "cpu" else torch.cuda.device_count()
    seen: list[tuple[bool, int, str]] = [(False, 0, "")] * dist.get_world_size()
    dist.all_gather_object(seen, (local_rank < num_gpus, node, os.uname().nodename))
    gpus, nodes, hosts = zip(*seen, strict=True)
    device = torch.device("cpu")
    group: Any = dist.group.WORLD
    if all(gpus):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl", timeout=timeout)
    return Ranks(rank=dist.get_rank(), device=device, nodes=nodes, hosts=hosts, group=group)
