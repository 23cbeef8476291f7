"""Measure the time until the ranks train, and until they train again after a rank gets SIGKILL.

First, ddprun, `ddprun --exec` and torchrun take turns. Each starts the same script on the loopback, as two nodes with
two ranks each, or as --nodes and --ranks say. The time is measured until the last rank has finished its first step.
Then the memory of all processes of the launch is measured. A page that several processes share counts once (PSS).

At the end, ddprun starts the script once more, and random ranks get SIGKILL. The time is measured from each SIGKILL
until all ranks have finished a step again.

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
import psutil

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


class Start(NamedTuple):
    """A launch, from its beginning to the last rank's first step."""

    wall_s: float
    cpu_s: float  # of all processes, to their end
    memory_mib: float  # of all processes, after the first step


def measure_start(launcher: str, size: Size) -> Start:
    """Start a training, measure it after its first step, and end it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        nodes = launch(launcher, Path(folder), size, steps=STEPS_FOR_EVER, restarts=0)
        try:
            wall_s = max(at for at, _ in first_steps(Path(folder), size, 0, nodes)) - started
            memory = sum(memory_of(node.pid) for node in nodes)
        finally:
            end(nodes)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Start(wall_s, cpu_s, memory / 2**20)


def memory_of(pid: int) -> int:
    """Return the bytes of a process and its descendants."""
    launcher = psutil.Process(pid)
    return sum(process.memory_full_info().pss for process in [launcher, *launcher.children(recursive=True)])


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
    starts: dict[str, list[Start]] = {launcher: [] for launcher in LAUNCHERS}
    for _, launcher in measuring.in_turns(list(LAUNCHERS), args.repeats):
        starts[launcher].append(measure_start(launcher, size))
    columns = {
        **{f"first step, {launcher}": [start.wall_s for start in starts[launcher]] for launcher in LAUNCHERS},
        **{f"CPU of it all, {launcher}": [start.cpu_s for start in starts[launcher]] for launcher in LAUNCHERS},
        "again after SIGKILL, ddprun": time_recoveries(args.kills, size) if args.kills else [],
    }
    memory = {launcher: [start.memory_mib for start in starts[launcher]] for launcher in LAUNCHERS}
    ratio, exec_ratio = (
        statistics.median(columns[f"first step, {launcher}"]) / statistics.median(columns["first step, torchrun"])
        for launcher in ("ddprun", "ddprun --exec")
    )
    memory_ratio = statistics.median(memory["ddprun"]) / statistics.median(memory["torchrun"])
    print(f"{size.nodes} nodes x {size.ranks} ranks, {size.device}, {measuring.machine()}")
    print(measuring.head("seconds", 28, 7))
    for name, values in columns.items():
        if values:
            print(measuring.row(name, values, 28, "7.2f"))
    print(measuring.head("MiB", 28, 7))
    for launcher, values in memory.items():
        print(measuring.row(f"memory, {launcher}", values, 28, "7.0f"))
    print(f"first step, ddprun / torchrun: {ratio:.2f} (goal: at most 0.45)")
    print(f"first step, ddprun --exec / torchrun: {exec_ratio:.2f}")
    print(f"memory, ddprun / torchrun: {memory_ratio:.2f}")
    result = {"machine": measuring.machine(), "ratio": ratio, "exec_ratio": exec_ratio, "seconds": columns}
    result |= {"memory_ratio": memory_ratio, "mib": memory}
    measuring.write_json(args.json, result)


if __name__ == "__main__":
    main()
