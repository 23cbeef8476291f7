"""Compare this checkout with another one: commands, the first step, a restart, checkpoints, and sending a project.

The two take turns. Each pair gives the ratio of this checkout's time to the other's. The table has the median of the
ratios and its 95 % confidence interval, which is a pair of the sorted ratios (binomial distribution, without a model).

    git worktree add /tmp/before COMMIT
    python bench/pairs.py /tmp/before [--pairs 20] [--only help,ps,start,restart,stall,sync,sharded] [--json FILE]

| name | what is measured |
|---|---|
| help, ps | CPU seconds of ``ddpctl --help``, and of ``ddpctl ps`` with 200 runs that have ended |
| start, restart | seconds until the first step of two ranks on one node, and until they train again after SIGKILL |
| stall | seconds for which a checkpoint blocks the training loop (ResNet-18 with momentum; bench/checkpoint.py) |
| sync | seconds to send 2,000 files (100 MB) to two sshds of this machine, once connected (bench/sync.py) |
| sharded | seconds in which four ranks save, and load, 1 GB, and the MiB by which one grows (bench/sharded.py) |

Each value is from new processes. The exit code is 1 if the lower end of an interval is above 1.03.
"""

import functools
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import measuring
import startup

HERE = Path(__file__).parents[1]
LIMIT = 1.03
RUNS = 200
SIZE = startup.Size(nodes=1, ranks=2)
CLEANUP = ExitStack()  # of what several values of a measure share


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


def bench(*arguments: str) -> Any:
    """Return the JSON value that a benchmark prints last."""
    script, *options = arguments
    line = [sys.executable, str(HERE / "bench" / script), *options]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def sync_lab() -> Any:
    """Return two hosts and a project of 2,000 files, for bench/sync.py. They stay until the end of this process."""
    import sync

    if sync.MISSING:
        sys.exit(f"pairs.py: sync {sync.MISSING}")
    folder = Path(CLEANUP.enter_context(tempfile.TemporaryDirectory(prefix="bench-sync-")))
    return CLEANUP.enter_context(sync.lab(folder, 2, 2000, 100_000_000))


def send_project(checkout: Path) -> float:
    """Return the seconds to send a project that the hosts do not have."""
    lab = sync_lab()
    seconds = lab.send("ddpctl, rsync on both ends", "first", checkout)
    lab.forget()
    shutil.rmtree(lab.folder / "runs")
    return float(seconds)


# Each measures the checkout that PYTHONPATH and its argument name, and returns one or more values by name.
MEASURES: dict[str, Callable[[Path], dict[str, float]]] = {
    "help": lambda _: {"help": cpu_s("--help")},
    "ps": lambda _: {"ps": cpu_s("ps", "--last", "0")},
    "start": lambda _: {"start": startup.measure_start("ddprun", SIZE).wall_s},
    "restart": lambda _: {"restart": startup.time_recoveries(1, SIZE)[0]},
    "stall": lambda _: {"stall": bench("checkpoint.py", "--stall", "--rounds", "5") / 1000},
    "sync": lambda checkout: {"sync": send_project(checkout)},
    "sharded": lambda _: bench("sharded.py"),
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
        values: dict[Path, list[dict[str, float]]] = {HERE: [], other: []}
        for _, checkout in measuring.in_turns(list(values), pairs):
            os.environ["PYTHONPATH"] = f"{checkout}/cli:{checkout}/trainer"
            values[checkout].append(MEASURES[name](checkout))
        for key in values[HERE][0]:
            columns = [[value[key] for value in side] for side in values.values()]
            ratios = [own / other for own, other in zip(*columns, strict=True)]
            low, high = interval(ratios)
            medians = [statistics.median(column) for column in columns]
            unit = "MiB" if key.endswith("memory") else "s"
            results[key] = {"ratio": statistics.median(ratios), "interval": [low, high], "unit": unit}
            results[key] |= {"medians": medians, "values": columns}
            print(
                f"{key:12} {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}), "
                f"{medians[0]:.3f} {unit} and {medians[1]:.3f} {unit}, {pairs} pairs, load {os.getloadavg()[0]:.1f}",
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
    with CLEANUP, tempfile.TemporaryDirectory() as state:
        os.environ |= {"DDPCTL_STATE_DIR": state, "PYTHONPATH": f"{HERE}/cli:{HERE}/trainer"}
        make_runs(Path(state))
        results = compare(args.other, args.only.split(","), args.pairs)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return int(any(result["interval"][0] > LIMIT for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
