"""Compare two ways to send a checkpoint's state to all ranks: tensor by tensor, as ddptrain does, and as pickled
objects.

There are four gloo ranks on this machine. Rank 0 has a state of 1 GiB (a model and Adam's moments). For each rank,
prints by how much its peak memory grew, and how many seconds the transfer took.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measuring
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "trainer"))

from ddptrain.distributed import RankInfo, broadcast, broadcast_state  # noqa: E402

RANKS = 4
MIB = 1 << 20


def state(mib: int) -> dict[str, Any]:
    """Return a state of ``mib`` MiB. A third is the model, and the rest is Adam's two moments of each parameter."""
    tensors = [torch.randn(MIB // 4) for _ in range(mib)]
    parameters, first, second = tensors[::3], tensors[1::3], tensors[2::3]
    moments = {
        number: {"exp_avg": average, "exp_avg_sq": square, "step": torch.tensor(3.0)}
        for number, (average, square) in enumerate(zip(first, second, strict=False))
    }
    return {"model": dict(enumerate(parameters)), "optimizer": {"state": moments}}


def rank_main(rank: int, how: str, mib: int, store: str) -> None:
    """Run one rank: receive the state, and print the memory and the time."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    info = RankInfo(rank=rank, size=RANKS, local_rank=rank, local_world_size=RANKS)
    parts = state(mib) if rank == 0 else {"model": {}, "optimizer": {}}
    dist.barrier()
    measuring.reset_peak()
    before, began = measuring.memory_mib("VmRSS"), time.monotonic()
    if how == "pickled":
        parts = broadcast(info, parts)
    else:
        for name in parts:
            parts[name] = broadcast_state(info, parts[name])
    assert parts["optimizer"]["state"][0]["step"] == 3
    dist.barrier()
    seconds = time.monotonic() - began
    print(f"{how:8} rank {rank}: {measuring.memory_mib('VmHWM') - before:6.0f} MiB, {seconds:7.3f} s", flush=True)


def main() -> None:
    """Try both ways, one after the other."""
    parser = measuring.options(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    options = parser.parse_args()
    for how in ("pickled", "tensors"):
        with tempfile.TemporaryDirectory() as folder:
            given = (how, options.mib, f"{folder}/store")
            start_processes(rank_main, given, nprocs=RANKS, start_method="fork")  # this process has only imported


if __name__ == "__main__":
    main()
