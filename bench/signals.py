"""Send SIGTERM to a ddprun with two ddptrain ranks, at random moments of the start and the training.

    python bench/signals.py [--moments 50] [--seed 0]

Three conditions must be met at each moment: the exit code is 143, ddprun ends within the grace period plus 5 s, and no
process is left. Prints one line for each moment. The exit code of the benchmark is 1 if a condition was not met.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import measuring

from ddpwire.exits import Exit, of_status
from ddpwire.run_files import read_node

GRACE_S = 10.0
LATE_S = 5.0  # what ddprun may need beyond the grace
START_TIMEOUT_S = 180.0


def start(run_dir: Path) -> subprocess.Popen[bytes]:
    """Start a training that takes longer than the benchmark."""
    place = ["--nproc-per-node", "2", "--grace", str(GRACE_S), "--run-dir", str(run_dir)]
    return subprocess.Popen(
        [sys.executable, "-m", "ddprun", *place, "-m", "ddptrain", "--epochs", "100000"],
        env=measuring.clean_environ() | {"DDP_RUN_DIR": str(run_dir), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def trains(run_dir: Path) -> bool:
    log = run_dir / "node-0" / "rank-0.log"
    return log.exists() and "epoch  1/" in log.read_text()


def phase(run_dir: Path) -> str:
    if trains(run_dir):
        return "training"
    with contextlib.suppress(OSError, ValueError):
        state = read_node((run_dir / "node-0" / "node.json").read_text()).state
        return "ranks start" if state == "training" else state
    return "before node.json"


def left(run_dir: Path) -> list[int]:
    """Return the pids of the processes that have the run's folder in their environment."""
    return [process.pid for process in measuring.processes_with("DDP_RUN_DIR", str(run_dir))]


def wait_until(condition: Callable[[], bool], timeout_s: float) -> float:
    """Wait until ``condition()`` is true, at most ``timeout_s``. Return the time that this took."""
    began = time.monotonic()
    while not condition() and time.monotonic() - began < timeout_s:
        time.sleep(0.02)
    return time.monotonic() - began


def try_one(moment_s: float) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        process = start(run_dir)
        time.sleep(moment_s)
        where = phase(run_dir)
        process.send_signal(signal.SIGTERM)
        took_s = wait_until(lambda: process.poll() is not None, GRACE_S + LATE_S + 10)
        wait_until(lambda: not left(run_dir), 2.0)
        orphans = left(run_dir)
        for pid in (*orphans, *((process.pid,) if process.poll() is None else ())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = of_status(process.wait(10))
        right = code == Exit.SAVED_TERM and not orphans and took_s <= GRACE_S + LATE_S
        line = f"after {moment_s:5.2f} s ({where:16}) exit code {code} in {took_s:5.2f} s, {len(orphans)} left"
        print(f"{line}{'' if right else '   WRONG'}", flush=True)
        return right


def time_to_train() -> float:
    with tempfile.TemporaryDirectory() as folder:
        process = start(Path(folder))
        took_s = wait_until(lambda: trains(Path(folder)), START_TIMEOUT_S)
        process.kill()  # its keeper ends the ranks
        process.wait(10)
        wait_until(lambda: not left(Path(folder)), 10.0)
        return took_s


def main() -> int:
    parser = measuring.options(__doc__)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    longest_s = 2 * time_to_train()
    print(f"an undisturbed run trains its first epoch after {longest_s / 2:.1f} s", flush=True)
    moments = random.Random(args.seed)  # noqa: S311
    num_right = sum(try_one(moments.uniform(0.0, longest_s)) for _ in range(args.moments))
    ended = f"ended within {GRACE_S + LATE_S:g} s with exit code 143, and left no process"
    print(f"{num_right} of {args.moments} runs {ended}")
    return 0 if num_right == args.moments else 1


if __name__ == "__main__":
    sys.exit(main())
