"""Count the healthy trainings that report a straggler, and check that a slow rank is reported.

In each run, ddprun starts a training of ddptrain. Every second run has four ranks, and the others have two. During half
of the runs, busy loops use all cores. In the slow runs, one rank takes --delay seconds longer for each step.

    python bench/stragglers.py [--healthy 20] [--slow 4] [--seconds 30] [--delay 0.01] [--json FILE]

The exit code is 1 if a healthy run reports a straggler, or if a slow run reports a healthy rank or does not report its
slow rank.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import measuring

RANK_MAIN = """
import os, runpy, sys, time
from ddptrain.data.loader import BatchBuilder

batch, (slow_rank, delay_s) = BatchBuilder.batch, sys.argv[1:3]

def slow_batch(builder, indices_B, **options):
    time.sleep(float(delay_s))
    return batch(builder, indices_B, **options)

if os.environ["RANK"] == slow_rank:
    BatchBuilder.batch = slow_batch
del sys.argv[1:3]
runpy.run_module("ddptrain", run_name="__main__", alter_sys=True)
"""
START_TIMEOUT_S = 300.0


def train(ranks: int, *, seconds: float, busy: int, slow_rank: int | None, delay_s: float) -> dict[str, object]:
    """Run a training and ``busy`` busy loops. Return the number of steps, and each report's step, rank and ratio."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "rank_main.py")
            script.write_text(RANK_MAIN)
            planted = ["-1" if slow_rank is None else str(slow_rank), str(delay_s)]
            options = ["--epochs", "1000000", "--stop-after", str(seconds / 60), "--device", "cpu"]
            command = [sys.executable, "-m", "ddprun", "--nproc-per-node", str(ranks), str(script), *planted, *options]
            done = subprocess.run(
                command,
                cwd=folder,
                env=measuring.clean_environ() | {"DDP_RUN_DIR": f"{folder}/run"},
                capture_output=True,
                text=True,
                timeout=seconds + START_TIMEOUT_S,
                check=False,
            )
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    stopped = re.search(r"after step (\d+) of", done.stdout)
    if stopped is None:
        raise SystemExit(f"stragglers.py: ddprun exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    reports = re.findall(r"step (\d+): rank (\d+) .* is slow: its steps take ([\d.]+) times", done.stdout)
    return {
        "ranks": ranks,
        "busy": busy,
        "slow_rank": slow_rank,
        "steps": int(stopped[1]),
        "reports": [[int(step), int(rank), float(ratio)] for step, rank, ratio in reports],
    }


def is_right(run: dict[str, object]) -> bool:
    """Return whether a run has the reports that it should have."""
    named = {rank for _, rank, _ in run["reports"]}  # type: ignore[attr-defined]
    return named == (set() if run["slow_rank"] is None else {run["slow_rank"]})


def main() -> int:
    parser = measuring.options(__doc__)
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--slow", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--delay", type=float, default=0.01, help="seconds a step of the slow rank")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(measuring.machine(), flush=True)
    runs = []
    for number in range(args.healthy + args.slow):
        ranks, busy = 2 + 2 * (number % 2), (os.cpu_count() or 1) * (number // 2 % 2)
        slow_rank = number % ranks if number >= args.healthy else None
        runs.append(train(ranks, seconds=args.seconds, busy=busy, slow_rank=slow_rank, delay_s=args.delay))
        kind = "healthy" if slow_rank is None else f"rank {slow_rank} slow"
        print(
            f"{kind:12}  {ranks} ranks  {busy} busy loops  {runs[-1]['steps']:6} steps  {runs[-1]['reports']}",
            flush=True,
        )
    healthy, slow = ([run for run in runs if (run["slow_rank"] is None) is well] for well in (True, False))
    print(f"healthy runs with a straggler line: {sum(not is_right(run) for run in healthy)} of {len(healthy)}")
    print(f"slow ranks named, and no other: {sum(map(is_right, slow))} of {len(slow)}")
    measuring.write_json(args.json, {"runs": runs})
    return 0 if all(map(is_right, runs)) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and with it the busy loops and the run
    sys.exit(main())
