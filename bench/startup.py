"""Measure the time until the ranks train, and until they train again after a rank gets SIGKILL.

First, ddprun, `ddprun --exec` and torchrun take turns. Each starts the same script on the loopback, as two nodes with
two ranks each, or as --nodes and --ranks say. The time is measured until the last rank has finished its first step.
Then ddprun starts the script, and random ranks get SIGKILL. The time is measured from each SIGKILL until all ranks have
finished a step again.

    python bench/startup.py [--repeats 3] [--kills 10] [--nodes 2] [--ranks 2] [--device cpu] [--json FILE]

Goals: ddprun takes at most 0.45 times as long as torchrun until the first step, and the ranks train again after at most
0.5 s. The exit code is 0 whatever the numbers are.
"""

import contextlib
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import measuring

from ddprun.system import processes

SCRIPT = Path(__file__).parent / "first_step.py"
TIMEOUT_S = 120.0
STEPS_FOR_EVER = 1_000_000
LAUNCHERS = {"ddprun": ("ddprun",), "ddprun --exec": ("ddprun", "--exec"), "torchrun": ("torch.distributed.run",)}


class Size(NamedTuple):
    """The number of nodes, of the ranks on each node, and the device of the ranks."""

    nodes: int
    ranks: int
    device: str = "cpu"


def launch(launcher: str, folder: Path, size: Size, *, steps: int, restarts: int) -> list[subprocess.Popen[bytes]]:
    """Start all nodes of a run whose ranks write into ``folder``."""
    options = ["--nnodes", size.nodes, "--nproc-per-node", size.ranks, "--max-restarts", restarts]
    options += ["--master-addr", "127.0.0.1", "--master-port", measuring.free_port()]
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                *LAUNCHERS[launcher],
                *map(str, [*options, "--node-rank", node, SCRIPT, folder, steps, size.device]),
            ],
            env=measuring.clean_environ() | {"DDP_NODES_HERE": str(size.nodes)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for node in range(size.nodes)
    ]


def first_steps(
    folder: Path, size: Size, attempt: int, nodes: list[subprocess.Popen[bytes]]
) -> list[tuple[float, int]]:
    """Wait for the first step of each rank in an attempt. For each rank, return the time of that step, and the pid."""
    files = [folder / f"{attempt}.{rank}" for rank in range(size.nodes * size.ranks)]

    def are_there() -> bool:
        for node in nodes:
            if node.poll():
                last = (node.stderr.read() if node.stderr else b"").decode(errors="replace").splitlines()[-1:]
                raise SystemExit(f"startup.py: a node exited with {node.returncode}: {''.join(last)}")
        return all(path.exists() for path in files)

    measuring.wait_until(are_there, f"the first step of attempt {attempt}", timeout_s=TIMEOUT_S, pause_s=0.005)
    return [(float(at), int(pid)) for at, pid in (path.read_text().split() for path in files)]


def time_first_step(launcher: str, size: Size) -> tuple[float, float]:
    """Return the seconds from the launch to the last rank's first step, and the CPU time of all processes of the
    launch.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        nodes = launch(launcher, Path(folder), size, steps=1, restarts=0)
        try:
            wall_s = max(at for at, _ in first_steps(Path(folder), size, 0, nodes)) - started
        finally:
            end(nodes)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def time_recoveries(kills: int, size: Size) -> list[float]:
    """Kill random ranks. For each SIGKILL, return the seconds until all ranks have finished a step again."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        nodes = launch("ddprun", Path(folder), size, steps=STEPS_FOR_EVER, restarts=kills)
        try:
            ranks = first_steps(Path(folder), size, 0, nodes)
            for attempt in range(1, kills + 1):
                time.sleep(random.uniform(0.3, 0.6))  # noqa: S311
                killed_at = time.time()
                os.kill(random.choice(ranks)[1], signal.SIGKILL)  # noqa: S311
                ranks = first_steps(Path(folder), size, attempt, nodes)
                seconds.append(max(at for at, _ in ranks) - killed_at)
        finally:
            end(nodes)
    return seconds


def end(nodes: list[subprocess.Popen[bytes]]) -> None:
    """End all processes of a launch."""
    for node in nodes:
        node.terminate()
    for node in nodes:
        try:
            node.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            node.kill()
            node.communicate()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)  # a launcher's children, which have become ours: so their CPU time counts


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on each node")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: with NCCL, for one rank per GPU"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    size = Size(args.nodes, args.ranks, args.device)
    processes.adopt_orphans()
    times: dict[str, list[tuple[float, float]]] = {one: [] for one in LAUNCHERS}
    for _, one in measuring.in_turns(list(LAUNCHERS), args.repeats):
        times[one].append(time_first_step(one, size))
    columns = {
        **{f"first step, {one}": [wall_s for wall_s, _ in times[one]] for one in LAUNCHERS},
        **{f"CPU of it all, {one}": [cpu_s for _, cpu_s in times[one]] for one in LAUNCHERS},
        "again after SIGKILL, ddprun": time_recoveries(args.kills, size) if args.kills else [],
    }
    theirs = statistics.median(columns["first step, torchrun"])
    ratio, exec_ratio = (
        statistics.median(columns[f"first step, {one}"]) / theirs for one in ("ddprun", "ddprun --exec")
    )
    print(f"{size.nodes} nodes x {size.ranks} ranks, {size.device}, {measuring.machine()}")
    print(measuring.head("seconds", 28, 7))
    for name, values in columns.items():
        if values:
            print(measuring.row(name, values, 28, "7.2f"))
    print(f"first step, ddprun / torchrun: {ratio:.2f} (goal: at most 0.45)")
    print(f"first step, ddprun --exec / torchrun: {exec_ratio:.2f}")
    result = {"machine": measuring.machine(), "ratio": ratio, "exec_ratio": exec_ratio, "seconds": columns}
    measuring.write_json(args.json, result)


if __name__ == "__main__":
    main()
