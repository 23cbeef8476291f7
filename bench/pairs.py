"""Compare this checkout with another one: ``ddpctl --help``, ``ddpctl ps``, the first step, and a restart.

The two take turns. Each pair gives the ratio of this checkout's time to the other's. The table has the median of the
ratios and its 95 % confidence interval, which is a pair of the sorted ratios (binomial distribution, without a model).

    git worktree add /tmp/before COMMIT
    python bench/pairs.py /tmp/before [--pairs 20] [--only help,ps,start,restart] [--json FILE]

help and ps (of 200 runs that have ended) count CPU seconds, start and restart seconds of the clock (one node, two
ranks). The exit code is 1 if the lower end of an interval is above 1.03.
"""

import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measuring
import startup

HERE = Path(__file__).parents[1]
LIMIT = 1.03
RUNS = 200
SIZE = startup.Size(nodes=1, ranks=2)


def cpu_s(*verb: str) -> float:
    """Return the CPU seconds of a ddpctl command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-P", "-m", "ddpctl", *verb], stdout=subprocess.DEVNULL, check=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def make_runs(state: Path) -> None:
    """Make the records of ``RUNS`` runs that have ended, from those of a real run."""
    (state / "script.py").touch()
    launch = ["launch", "--gpus", "1", "--device", "cpu", "--name", "run-0", "--", "script.py"]
    subprocess.run([sys.executable, "-P", "-m", "ddpctl", *launch], cwd=state, capture_output=True, check=True)
    for number in range(1, RUNS):
        folder = state / f"run-{number}"
        shutil.copytree(state / "run-0", folder)
        record = json.loads((folder / "run.json").read_text())
        record |= {"name": folder.name, "folder": str(folder), "uid": f"{number:012x}"}
        record |= {"checkpoint_dir": str(folder / "checkpoints")}
        (folder / "run.json").write_text(json.dumps(record))


MEASURES: dict[str, Callable[[], float]] = {
    "help": lambda: cpu_s("--help"),
    "ps": lambda: cpu_s("ps", "--last", "0"),
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


def compare(other: Path, names: Sequence[str], pairs: int) -> dict[str, dict[str, Any]]:
    """Measure ``pairs`` pairs of each name, and print a line for each. Return the results by name."""
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        seconds: dict[Path, list[float]] = {HERE: [], other: []}
        for _, checkout in measuring.in_turns(list(seconds), pairs):
            os.environ["PYTHONPATH"] = f"{checkout}/cli:{checkout}/trainer"
            seconds[checkout].append(MEASURES[name]())
        ratios = [here / other for here, other in zip(*seconds.values(), strict=True)]
        low, high = interval(ratios)
        medians = [statistics.median(values) for values in seconds.values()]
        results[name] = {"ratio": statistics.median(ratios), "interval": [low, high], "seconds": medians}
        print(
            f"{name:8} {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}), "
            f"{medians[0]:.3f} s and {medians[1]:.3f} s, {pairs} pairs",
            flush=True,
        )
    return results


def main() -> int:
    parser = measuring.options(__doc__)
    parser.add_argument("other", type=Path, help="the folder of the other checkout")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--only", default=",".join(MEASURES), metavar="NAMES")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not (args.other / "cli" / "ddpctl").is_dir():
        parser.error(f"{args.other} is no checkout of ddpctl (git worktree add FOLDER COMMIT makes one)")
    args.other = args.other.resolve()
    startup.processes.adopt_orphans()
    print(measuring.machine(), flush=True)
    with tempfile.TemporaryDirectory() as state:
        os.environ |= {"DDPCTL_STATE_DIR": state, "PYTHONPATH": f"{HERE}/cli:{HERE}/trainer"}
        make_runs(Path(state))
        results = compare(args.other, args.only.split(","), args.pairs)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return int(any(result["interval"][0] > LIMIT for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
