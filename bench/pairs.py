"""Compare this checkout with another one: ``ddpctl --help``, ``ddpctl ps``, the first step, and a restart.

The two take turns. Each pair gives the ratio of this checkout's time to the other's. The table has the median of the
ratios and its 95 % confidence interval, which is a pair of the sorted ratios (binomial distribution, without a model).

    git worktree add /tmp/before COMMIT
    python bench/pairs.py /tmp/before [--pairs 20] [--only help,ps,start,restart] [--json FILE]

help and ps count CPU seconds, start and restart seconds of the clock (one node, two ranks). The exit code is 1 if the
lower end of an interval is above 1.03.
"""

import json
import math
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import measuring
import startup

HERE = Path(__file__).parents[1]
LIMIT = 1.03
SIZE = startup.Size(nodes=1, ranks=2)


def cpu_s(*verb: str) -> float:
    """Return the CPU seconds of a ddpctl command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-P", "-m", "ddpctl", *verb], stdout=subprocess.DEVNULL, check=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


MEASURES: dict[str, Callable[[], float]] = {
    "help": lambda: cpu_s("--help"),
    "ps": lambda: cpu_s("ps"),
    "start": lambda: startup.measure_start("ddprun", SIZE).wall_s,
    "restart": lambda: startup.time_recoveries(1, SIZE)[0],
}


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median: the ranks k and n + 1 - k of the sorted ratios."""
    n = len(ratios)
    tail, k = 0.0, 0
    while (tail := tail + math.comb(n, k) / 2**n) <= 0.025:
        k += 1
    return sorted(ratios)[max(k - 1, 0)], sorted(ratios)[min(n - k, n - 1)]


def main() -> int:
    parser = measuring.options(__doc__)
    parser.add_argument("other", type=Path, help="the folder of the other checkout")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--only", default=",".join(MEASURES), metavar="NAMES")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    startup.processes.adopt_orphans()
    print(measuring.machine(), flush=True)
    results, failed = {}, False
    for name in args.only.split(","):
        seconds: dict[Path, list[float]] = {HERE: [], args.other: []}
        for _, checkout in measuring.in_turns(list(seconds), args.pairs):
            os.environ["PYTHONPATH"] = f"{checkout}/cli:{checkout}/trainer"
            seconds[checkout].append(MEASURES[name]())
        ratios = [here / other for here, other in zip(*seconds.values(), strict=True)]
        low, high = interval(ratios)
        medians = [statistics.median(values) for values in seconds.values()]
        failed |= low > LIMIT
        results[name] = {"ratio": statistics.median(ratios), "interval": [low, high], "seconds": medians}
        print(
            f"{name:8} {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}), "
            f"{medians[0]:.3f} s and {medians[1]:.3f} s, {args.pairs} pairs",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
