"""Compare the bus bandwidth (busbw) of `ddpctl bench` with that of a loop written by hand, on the same ranks.

    python bench/collectives.py [--nproc 2] [--repeats 40] [--bytes 1048576]

Each repeat measures in the order loop, bench, bench, loop. The result is a ratio: the best figure of bench, divided by
the best figure of the loop. The best figures are used, because other work on the machine can only make a call slower.

Each repeat gives a first and a last figure of the loop. The ratio is valid only if the loop is stable: the best of all
first figures and the best of all last figures differ by at most 5 %. The measurement is repeated until the loop is
stable, at least --repeats times and at most 10 * --repeats times.

The exit code is 1 if a valid ratio differs from 1 by more than 10 %. It is 3 if the loop does not become stable,
because the machine is too busy. Needs an idle machine.
"""

import os
import statistics
import subprocess
import sys
import time

import measuring

CALLS = 20
STEADY, BAR = 0.05, 0.1
TOO_BUSY = 3


def by_hand(name: str, size: int) -> float:
    """Return the busbw in GB/s, computed from the time of the slowest rank.

    The busbw is size / time * factor, as defined in PERFORMANCE.md of nccl-tests.
    """
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
    """Run one rank. Rank 0 prints the results."""
    import torch.distributed as dist

    from ddpcheck import collectives
    from ddpcheck.collectives import join

    collectives.CALLS = (CALLS, CALLS)  # on a busy machine a bench makes fewer
    ranks, code = join(), 0
    for name in ("all_reduce", "all_gather", "broadcast"):
        ours, theirs = [], []
        itself = 0.0  # the figures are the same on all ranks
        while len(ours) < 2 * repeats or (abs(itself - 1) > STEADY and len(ours) < 20 * repeats):
            theirs.append(by_hand(name, size))
            ours += [collectives.measure(name, ranks, size).busbw for _ in range(2)]
            theirs.append(by_hand(name, size))
            itself = max(theirs[1::2]) / max(theirs[::2])
        ratio = max(ours) / max(theirs)
        code = max(code, TOO_BUSY if abs(itself - 1) > STEADY else int(abs(ratio - 1) > BAR))
        if ranks.rank == 0:
            medians = statistics.median(ours) / statistics.median(theirs)
            print(
                f"{ranks.size} ranks  {name:12}{max(ours):8.3f}{max(theirs):8.3f}  ratio {ratio:.3f}  "
                f"of medians {medians:.3f}  the loop to itself {itself:.3f}  "
                f"{len(ours)} each  load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    dist.destroy_process_group()
    sys.exit(code)


def main() -> int:
    parser = measuring.options(__doc__)
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
