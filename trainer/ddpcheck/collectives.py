"""The ranks of a check, and the collectives: what each does, how its bandwidth is computed, and if its result is right.

algbw = S / t and busbw = algbw x factor, as nccl-tests define them (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
S is the size of the larger of a rank's two buffers. So for all_gather and reduce_scatter with n ranks, S is n times
what a rank contributes or keeps. ``FACTORS`` has the factors of that page. The page does not list gather and scatter.
Their factor here is (n-1)/n, the share of S that passes the root's link. In send_recv, each rank sends to the next one.

t is the mean of up to 20 calls after one warm-up call, on the slowest rank (nccl-tests use the mean over the ranks).
The data are whole numbers in float32, so their sums are exact. After the timed calls, the result of one more call is
compared with the expected result, element by element.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpwire import names

TIMEOUT_S = 180.0  # for one operation of the process groups
BUDGET_S = 0.5  # time for the timed calls of one size
CALLS = (2, 20)  # the lowest and the highest number of timed calls
ROOT = 0
IN_PLACE = ("all_reduce", "broadcast", "reduce")


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


@dataclass(frozen=True, kw_only=True)
class Row:
    """The measurement of one collective at one size. Bandwidths are in GB/s (1e9 bytes per second)."""

    collective: str
    bytes: int
    seconds: float
    algbw: float
    busbw: float
    wrong: Mapping[int, int]  # rank → how many elements of its result are wrong


def operation(name: str, ranks: Ranks, base: Tensor) -> tuple[Callable[[], Any], Tensor, Tensor, Tensor | None]:
    """Return a call of the collective, the buffer that it writes, and the buffer's values before and after the call.

    ``base`` is as large as the larger buffer and has the same values on all ranks. Its size is a multiple of the number
    of ranks. The values after the call are None if this rank gets no result.
    """
    n, rank, group, part = ranks.size, ranks.rank, ranks.group, base.numel() // ranks.size
    own, total, out = base + rank, n * base + n * (n - 1) // 2, torch.empty_like(base)
    first, mine = base[:part], slice(rank * part, (rank + 1) * part)
    by_rank = torch.arange(n, device=base.device, dtype=base.dtype).repeat_interleave(part)
    own_first, small, all_firsts = first + rank, torch.empty_like(first), first.repeat(n) + by_rank
    is_root = rank == ROOT
    parts, of_root = (list(out.chunk(n)), list(base.chunk(n))) if is_root else (None, None)
    after, before = (rank + 1) % n, (rank - 1) % n
    run, written, expected = {
        "all_reduce": (lambda: dist.all_reduce(out, group=group), out, total),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(small, own, group=group), small, total[mine]),
        "all_gather": (lambda: dist.all_gather_into_tensor(out, own_first, group=group), out, all_firsts),
        "all_to_all": (lambda: dist.all_to_all_single(out, own, group=group), out, base[mine].repeat(n) + by_rank),
        "broadcast": (lambda: dist.broadcast(out, ROOT, group=group), out, base + ROOT),
        "reduce": (lambda: dist.reduce(out, ROOT, group=group), out, total if is_root else None),
        "scatter": (lambda: dist.scatter(small, of_root, ROOT, group=group), small, base[mine]),
        "gather": (lambda: dist.gather(own_first, parts, ROOT, group=group), out, all_firsts if is_root else None),
        "send_recv": (lambda: swap(ranks, own, after, out, before), out, base + before),
    }[name]
    return run, written, own if name in IN_PLACE else torch.tensor(-1.0), expected


FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), lambda n: (n - 1) / n),
    **dict.fromkeys(("broadcast", "reduce"), lambda _: 1.0),
    **dict.fromkeys(("scatter", "gather"), lambda n: (n - 1) / n),
    "send_recv": lambda _: 1.0,
}


def swap(ranks: Ranks, out: Tensor, to: int, into: Tensor, from_: int) -> None:
    """Send a tensor to rank ``to`` and receive one from rank ``from_`` at the same time."""
    both = ((dist.isend, out, to), (dist.irecv, into, from_))
    for work in dist.batch_isend_irecv([dist.P2POp(verb, data, peer, ranks.group) for verb, data, peer in both]):
        work.wait()


def measure(name: str, ranks: Ranks, size: int) -> Row:
    """Time a collective and check one result. S is ``size`` bytes, rounded to a multiple of the number of ranks."""
    count = max(1, round(size / 4 / ranks.size)) * ranks.size
    base = torch.arange(count, device=ranks.device).remainder(251).float()
    run, out, start, expected = operation(name, ranks, base)

    def time_calls(calls: int) -> float:
        out.copy_(start)
        ranks.barrier()
        started = time.perf_counter()
        for _ in range(calls):
            run()
        ranks.synchronize()
        return ranks.slowest((time.perf_counter() - started) / calls)

    seconds = time_calls(min(max(int(BUDGET_S / time_calls(1)), CALLS[0]), CALLS[1]))
    time_calls(1)
    wrong = 0 if expected is None else int((out != expected).sum())
    algbw = count * 4 / seconds / 1e9
    return Row(
        collective=name,
        bytes=count * 4,
        seconds=seconds,
        algbw=algbw,
        busbw=algbw * FACTORS[name](ranks.size),
        wrong={rank: number for rank, number in enumerate(ranks.gather(wrong)) if number},
    )
