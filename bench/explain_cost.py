"""Measure how much slower a training step is because the ranks can answer ``ddpctl explain``.

Each rank has a thread that answers ``ddpctl explain``, and torch's flight recorder is on. Both cost time.

    python bench/explain_cost.py [--pairs 30] [--steps 800] [--recorded-steps 3000] [--json FILE]

A pair consists of two launches of a plain DistributedDataParallel script with 2 gloo ranks under ddprun: one with the
thread and the flight recorder, and one without them. Every second pair runs in reversed order. After a warm-up, the
ranks measure the CPU time of a step (the sum of both ranks) and the median wall time of a step (on rank 0). Each of
these two times gives one ratio per pair. Needs an idle machine. The exit code is 1 if the 95 % bootstrap interval of
the mean ratio ends above the goal of 1.02.

With --recorded-steps, steps are also measured while ``ddpctl profile`` records, and while the trace is written. There
is no goal for these times.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import measuring

SCRIPT = Path(__file__).with_name("explain_cases") / "steps.py"
RANKS, TIMEOUT_S = 2, 300.0
GOAL, RESAMPLES = 1.02, 10_000
WITH, WITHOUT = "with", "without"


def launch(way: str, steps: int) -> list[dict[str, float]]:
    """Launch a training and return what each rank has measured, in seconds."""
    environ = measuring.clean_environ("TORCH_") | {"OMP_NUM_THREADS": "1"}
    environ |= {"TORCH_FR_BUFFER_SIZE": "0"} if way == WITHOUT else {}
    with tempfile.TemporaryDirectory() as folder:
        options = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=0", f"--run-dir={folder}/run"]
        command = [sys.executable, "-m", "ddprun", *options, str(SCRIPT), way, str(steps), folder]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise SystemExit(f"explain_cost.py: a launch exited with {done.returncode}: {done.stderr[-2000:]}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


def step(way: str, steps: int) -> dict[str, float]:
    """Return the seconds of a step: CPU time of both ranks, wall time of rank 0."""
    ranks = launch(way, steps)
    return {"cpu": sum(rank["cpu"] for rank in ranks), "wall": ranks[0]["wall"]}


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean."""
    draw = random.Random(0)  # noqa: S311
    means = sorted(statistics.fmean(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--recorded-steps", type=int, default=0, help="with a recording of 1 s every 4 s")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pairs: list[dict[str, dict[str, float]]] = [{} for _ in range(args.pairs)]
    for number, way in measuring.in_turns((WITHOUT, WITH), args.pairs):
        pairs[number][way] = step(way, args.steps)
    machine = measuring.machine()
    print(f"{RANKS} gloo ranks, {args.pairs} pairs of {args.steps} steps, {machine}")
    intervals = {}
    for clock in ("cpu", "wall"):
        ms = {way: 1000 * statistics.median(pair[way][clock] for pair in pairs) for way in (WITH, WITHOUT)}
        ratios = [pair[WITH][clock] / pair[WITHOUT][clock] for pair in pairs]
        intervals[clock] = low, high = interval(ratios)
        print(
            f"{clock:4} ms a step: with {ms[WITH]:.3f}, without {ms[WITHOUT]:.3f}; ratio {statistics.fmean(ratios):.4f}"
        )
        verdict = f"goal at most {GOAL}: {'NOT ' * (high > GOAL)}reached"
        print(f"{clock:4} 95 % interval {low:.4f} to {high:.4f}, {verdict}")
    recorded = launch("recorded", args.recorded_steps)[0] if args.recorded_steps else {}
    for clock in ("cpu", "wall") if recorded else ():
        outside = recorded[f"{clock} outside"]
        for phase in ("recording", "writing"):
            seconds = recorded[f"{clock} {phase}"]
            print(f"{clock:4} ms a step: {phase} {1000 * seconds:.3f}, outside {1000 * outside:.3f}; "
                  f"ratio {seconds / outside:.3f}")  # fmt: skip
    result = {"machine": machine, "intervals": intervals, "pairs": pairs, "recorded": recorded}
    measuring.write_json(args.json, result)
    sys.exit(any(high > GOAL for _, high in intervals.values()))


if __name__ == "__main__":
    main()
