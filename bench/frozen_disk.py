"""Freeze the disk with one node's folder of the run while two nodes train, and count how often the folder is used.

    python bench/frozen_disk.py [--ways fsfreeze,bindfs] [--seconds 6,20,40,60] [--rounds 5] [--load] [--json FILE]

fsfreeze stops the writes to a file system on a loop device. A stopped bindfs stops reads and writes. Node 1's folder is
on the disk, in every second round node 0's folder. Expected: for 6 s, no message; for 20 and 40 s, one message, one
when the disk answers again, and a training that ends well; for 60 s, an end with exit code 73 within 50 s, and a
message that names the folder. The ranks take steps meanwhile. --load counts instead, with strace, the system calls a
second in the run's folder of two nodes with four ranks each. Needs root on Linux, and bindfs and strace (apt install
bindfs strace). The exit code is 1 if a result is not as expected.
"""

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import measuring
import psutil
from measuring import runtime_files

from ddprank.heartbeat import read_beat
from ddpwire.exits import Exit
from ddpwire.run_files import rank_heartbeat

RANK_MAIN = """
import os, time
import torch.distributed as dist, torch
from ddpwire.script import progress
dist.init_process_group("gloo")
value, step = torch.zeros(1), 0
while not value.item():
    step += 1
    progress(step, total=10**6)
    time.sleep(0.05)
    value.fill_(os.path.exists(os.environ["END"]))
    dist.all_reduce(value)
"""
START_TIMEOUT_S, END_TIMEOUT_S = 300.0, 120.0
EXIT_WITHIN_S = 50.0
LOAD_S = 30.0
CALLS = {
    "opens": r"open(at2?)?\(",
    "stats by path": r"(stat|lstat|newfstatat|statx|access|faccessat2?)\((?!.*, \"\", )",
    "fstats": r"(fstat\(|(newfstatat|statx)\(.*, \"\", )",
    "renames": r"rename(at2?)?\(",
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What happened while the disk with a node's folder was frozen."""

    way: str
    seconds: float
    node: int
    steps: int  # that the ranks took meanwhile
    codes: list[int | None]
    ended_s: float | None  # how long after the freeze the node ended, if it ended before the disk answered
    lines: list[str]  # of both nodes, since the freeze
    left: int  # processes at the end

    @property
    def errors(self) -> list[str]:
        """Return what differs from the expected result."""
        naming = [line for line in self.lines if f"/node-{self.node}" in line]
        if self.seconds < EXIT_WITHIN_S:
            expected = [0] * 2, 0 if self.seconds < 10 else 2
            wrong = [] if (self.codes, len(naming)) == expected else [f"expected {expected}, not these codes or lines"]
        else:
            wrong = [] if self.codes == [Exit.CANNOT_WRITE] * 2 else ["another exit code"]
            wrong += [] if self.ended_s and self.ended_s < EXIT_WITHIN_S else ["it ended late"]
            wrong += [] if naming and str(int(Exit.CANNOT_WRITE)) in naming[-1] else ["no message names the folder"]
        wrong += [] if self.steps > 10 * min(self.seconds, 40.0) / 6 else ["the ranks waited"]
        return [*wrong, *(["processes are left"] if self.left else [])]


@contextlib.contextmanager
def disk(way: str, folder: Path, at: Path) -> Iterator[dict[bool, Any]]:
    """Mount a disk at ``at``. Yield the functions that freeze it (True) and make it answer again (False)."""
    at.mkdir(parents=True)
    if way == "fsfreeze":
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(1 << 28)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, at], check=True)
        server = None
    else:
        (folder / "behind").mkdir()
        server = subprocess.Popen(["bindfs", "-f", folder / "behind", at])
        measuring.wait_until(at.is_mount, "the mount", timeout_s=30)

    def turn(is_frozen: bool) -> None:
        if server:
            server.send_signal(signal.SIGSTOP if is_frozen else signal.SIGCONT)
        else:
            subprocess.run(["fsfreeze", "-f" if is_frozen else "-u", at], check=True)

    try:
        yield {True: lambda: turn(True), False: lambda: turn(False)}
    finally:
        subprocess.run(["umount", "--lazy", at], check=True)
        if server:
            server.kill()  # another mount namespace may still have the mount
            server.wait(30)


class Job:
    """Two nodes on this machine, and the lines that they log."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.run, self._end = folder / "run", folder / "end"
        (folder / "train.py").write_text(RANK_MAIN)
        environ = measuring.clean_environ() | {"DDP_RUN_DIR": str(self.run), "END": str(self._end), "DDP_DEVICE": "cpu"}
        port, self.lines, self.num_ranks = str(measuring.free_port()), list[str](), 2 * ranks
        self.nodes: list[subprocess.Popen[str]] = []
        for node in range(2):
            place = ["--nnodes", "2", "--node-rank", f"{node}", "--nproc-per-node", f"{ranks}", "--max-restarts", "0"]
            place += ["--master-addr", "127.0.0.1", "--master-port", port, str(folder / "train.py")]
            self.nodes.append(
                measuring.start_python(["-m", "ddprun", *place], env=environ, cwd=folder, text=True,
                                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            )  # fmt: skip
            threading.Thread(target=self._read, args=(self.nodes[-1],), daemon=True).start()

    def _read(self, node: "subprocess.Popen[str]") -> None:
        assert node.stdout is not None
        self.lines += node.stdout

    def train(self) -> list[Path]:
        """Wait until all ranks take steps. Return their heartbeat files."""

        def beats() -> list[Path]:
            return [path for rank in range(self.num_ranks) for path in runtime_files(self.run, rank_heartbeat(rank))]

        def is_training() -> bool:
            assert all(node.poll() is None for node in self.nodes), self.lines
            return len(beats()) == self.num_ranks and all(step(path) > 20 for path in beats())

        measuring.wait_until(is_training, "the training", timeout_s=START_TIMEOUT_S)
        return beats()

    def end(self) -> list[int | None]:
        """Let the ranks end. Return the exit codes of the nodes."""
        self._end.touch()
        codes: list[int | None] = []
        for node in self.nodes:
            try:
                codes.append(node.wait(END_TIMEOUT_S))
            except subprocess.TimeoutExpired:
                node.kill()
                codes.append(None)
        return codes

    def pids(self) -> list[int]:
        """Return the processes of the run that are alive."""
        return [process.pid for process in measuring.processes_with("END", str(self._end))]


def step(heartbeat: Path | BinaryIO) -> int:
    """Return the step of a rank."""
    beat = read_beat(heartbeat)
    return beat.step or 0 if beat else 0


def freeze(way: str, seconds: float, node: int) -> Result:
    """Freeze the disk with a node's folder for some seconds, while the run trains."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with disk(way, folder, folder / "run" / f"node-{node}") as turn, contextlib.ExitStack() as stack:
            job = Job(folder, ranks=1)
            beats = job.train()
            opened = [stack.enter_context(path.open("rb")) for path in beats]  # a node that ends removes them
            before, num_lines = step(opened[0]), len(job.lines)
            began, ended_s, last = time.monotonic(), None, before
            turn[True]()
            try:
                while (passed_s := time.monotonic() - began) < seconds:
                    time.sleep(0.1)
                    last = max(last, *map(step, opened))
                    if ended_s is None and job.nodes[node].poll() is not None:
                        ended_s = round(passed_s, 1)
            finally:
                turn[False]()
            if ended_s is None and seconds > 10:
                here = f"/node-{node}"
                with contextlib.suppress(SystemExit):  # then the message is missing
                    measuring.wait_until(lambda: sum(here in line for line in job.lines) > 1, "", timeout_s=10)
            codes = job.end()
            with contextlib.suppress(SystemExit):
                measuring.wait_until(lambda: not job.pids(), "the end of all processes", timeout_s=20)
            pids, lines = job.pids(), [line.strip() for line in job.lines[num_lines:]]
            for pid in pids:
                psutil.Process(pid).kill()
    return Result(way=way, seconds=seconds, node=node, steps=last - before, codes=codes, ended_s=ended_s,
                  lines=lines, left=len(pids))  # fmt: skip


def load() -> dict[str, float]:
    """Return how often a node of a run uses the run's folder, a second."""
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name), ranks=4)
        job.train()
        trace = Path(name, "trace")
        pids = [word for pid in job.pids() for word in ("-p", str(pid))]
        watch = subprocess.Popen(["strace", "-f", "-q", "-y", "-e", "trace=%file,%desc", "-o", trace, *pids])
        time.sleep(LOAD_S)
        watch.send_signal(signal.SIGINT)
        watch.wait(60)
        lines = [line for line in trace.read_text(errors="replace").splitlines() if str(job.run) in line]
        codes = job.end()
    assert codes == [0, 0], job.lines
    return {kind: sum(bool(re.search(rf"\d\s+{call}", line)) for line in lines) / LOAD_S / 2
            for kind, call in CALLS.items()}  # fmt: skip


def main() -> None:
    """Measure, and print a table."""
    parser = measuring.options(__doc__)
    parser.add_argument("--ways", default="fsfreeze,bindfs")
    parser.add_argument("--seconds", default="6,20,40,60")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=4, help="freezes at the same time")
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.load:
        calls = load()
        print("a node and second: " + ", ".join(f"{number:.2f} {kind}" for kind, number in calls.items()))
        sys.exit(calls["opens"] + calls["stats by path"] + calls["renames"] > 2)
    tries = [(way, float(seconds), (number + 1) % 2) for number in range(args.rounds)
             for way in args.ways.split(",") for seconds in args.seconds.split(",")]  # fmt: skip
    results = []
    with ThreadPoolExecutor(args.at_once) as pool:
        for result in pool.map(lambda case: freeze(*case), tries):
            results.append(asdict(result) | {"errors": result.errors})
            state = "; ".join(result.errors) or "as expected"
            took = "" if result.ended_s is None else f", ended after {result.ended_s} s"
            print(f"{result.way} {result.seconds:g} s, node {result.node}: {result.steps} steps, "
                  f"codes {result.codes}{took}: {state}", flush=True)  # fmt: skip
            for line in result.lines:
                print(f"    {line}", flush=True)
    measuring.write_json(args.json, results)
    sys.exit(any(result["errors"] for result in results))


if __name__ == "__main__":
    main()
