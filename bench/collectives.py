"""Is the busbw of `ddpctl bench` right? Beside loops written by hand on the same ranks, interleaved, as ratios.

    python bench/collectives.py [--nproc 2] [--repeats 40] [--bytes 1048576]

A ratio is of two medians. The exit code is 1 if one is more than 10 % off. Wants an idle machine.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

CALLS = 20


def by_hand(name: str, size: int) -> float:
    """busbw in GB/s: S and the factor as nccl-tests' PERFORMANCE.md has them, the time of the slowest rank."""
    import torch
    import torch.distributed as dist

    n = dist.get_world_size()
    whole, part = torch.ones(size // 4), torch.ones(size // 4 // n)
    call, factor = {
        "all_reduce": (lambda: dist.all_reduce(whole), 2 * (n - 1) / n),
        "all_gather": (lambda: dist.all_gather_into_tensor(whole, part), (n - 1) / n),
        "broadcast": (lambda: dist.broadcast(whole, 0), 1.0),
    }[name]
    call()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    seconds = torch.tensor((time.perf_counter() - started) / CALLS)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return size / float(seconds) / 1e9 * factor


def rank(repeats: int, size: int) -> None:
    """One rank; the first prints."""
    import torch.distributed as dist

    from ddpcheck import collectives
    from ddpcheck.ranks import join

    collectives.CALLS = (CALLS, CALLS)  # on a busy machine a bench makes fewer
    ranks, off = join(), False
    for name in ("all_reduce", "all_gather", "broadcast"):
        ours, theirs = [], []
        for turn in range(2 * repeats):  # in each pair the other one is first
            if turn % 4 in (0, 3):
                ours.append(collectives.measure(name, ranks, size).busbw)
            else:
                theirs.append(by_hand(name, size))
        ratio = statistics.median(ours) / statistics.median(theirs)
        off |= abs(ratio - 1) > 0.1
        if ranks.rank == 0:
            values = f"{statistics.median(ours):8.3f}{statistics.median(theirs):8.3f}"
            print(
                f"{ranks.size} ranks  {name:12}{values}  ratio {ratio:.3f}  load {os.getloadavg()[0]:.1f}", flush=True
            )
    dist.destroy_process_group()
    sys.exit(int(off))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--bytes", type=int, default=1 << 20)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank(args.repeats, args.bytes)
    command = [sys.executable, "-m", "ddprun", "--nproc-per-node", str(args.nproc), "--no-prefix", "--exec"]
    return subprocess.run(
        [*command, __file__, *sys.argv[1:]], env=os.environ | {"DDP_DEVICE": "cpu"}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
