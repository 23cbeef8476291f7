"""A training on two machines with two ranks each, and what can be observed from outside its processes.

The job starts one ddprun (or torchrun) per node. While it is ``tended``, it acts like a scheduler: it starts a node
again if the node's exit code means that a retry may help.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import lab
import measuring

from ddpwire.exits import of_status, worth_a_retry
from ddpwire.run_files import NodeState, Outcome, read_node, read_outcome

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "fault_injection" / "training.py"
PORT = "61234"
NODES, RANKS_HERE = 2, 2
WORLD = range(NODES * RANKS_HERE)
START_S = 90.0
POLL_S = 0.02
STARTS = 6  # of one node; a scheduler has a limit, too
MODULES = {"ddprun": "ddprun", "torchrun": "torch.distributed.run"}
SPOKEN = re.compile(r"\[node\d+\] |.*torch[./]distributed[./]elastic")  # a launcher's own word, not a rank's


class TooLateError(Exception):
    """Raised if a wait reaches its time-out."""


@dataclass(frozen=True, kw_only=True)
class Step:
    at: float  # time.time()
    step: int


@dataclass(kw_only=True)
class Job:
    """One run of a training."""

    machines: tuple[lab.Machine, ...]
    folder: Path
    launcher: str = "ddprun"
    options: tuple[str, ...] = ()
    script_args: tuple[str, ...] = ()
    master: str = "node-0"
    environ: dict[int, dict[str, str]] = field(default_factory=dict)  # of a node, besides
    enter: dict[int, Callable[[], None]] = field(default_factory=dict)  # called in a node's child, before it is ddprun
    tended: bool = False
    most_starts: int = STARTS
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    codes: dict[int, list[int]] = field(default_factory=lambda: {node: [] for node in range(NODES)})

    def start(self, *nodes: int) -> None:
        """Start these nodes; by default, all nodes."""
        self.tend()
        for node in nodes or range(NODES):
            self.home(node).mkdir(exist_ok=True)
            place = ["--nnodes", NODES, "--nproc-per-node", RANKS_HERE, "--node-rank", node]
            place += ["--master-addr", self.master, "--master-port", PORT]
            command = ["-m", MODULES[self.launcher], *map(str, place), *self.options, str(SCRIPT), str(self.folder)]
            with self.said_by(node).open("ab") as output:
                self.processes[node] = self.machines[node].start(
                    *command,
                    *self.script_args,
                    env=self._environ(node),
                    cwd=self.home(node),
                    stdout=subprocess.DEVNULL,
                    stderr=output,
                    preexec_fn=self.enter.get(node),
                )

    def _environ(self, node: int) -> dict[str, str]:
        path = [str(self.home(node)), str(ROOT / "trainer"), os.environ.get("PYTHONPATH", "")]
        ours = {
            "PYTHONPATH": os.pathsep.join(path),
            "DDP_RUN_DIR": str(self.folder),
            "DDP_RUN_ID": "faults",
            "DDP_DEVICE": "cpu",
            "DDP_NODES_HERE": str(NODES),
            "OMP_NUM_THREADS": "1",
        }
        if self.launcher == "torchrun":  # whose ranks else meet at whatever address the host's name has
            ours["GLOO_SOCKET_IFNAME"] = "eth0"
        return measuring.clean_environ() | ours | self.environ.get(node, {})

    def tend(self) -> None:
        """Record which nodes have ended. While the job is ``tended``, start an ended node again if a retry may help."""
        for node, process in list(self.processes.items()):
            if self.processes.get(node) is not process:  # restarted meanwhile
                continue
            if process.poll() is None or len(self.codes[node]) == self.most_starts:
                continue
            del self.processes[node]
            code = of_status(process.returncode)
            self.codes[node].append(code)
            if self.tended and worth_a_retry(code):
                self.start(node)

    def tend_from_now(self) -> None:
        """Start the nodes that have ended. From now on, start a node again when it ends and a retry may help."""
        self.tend()
        self.tended = True
        for node in range(NODES):
            if node not in self.processes:
                self.start(node)

    def until(self, condition: Callable[[], object], event: str, timeout_s: float = START_S) -> float:
        """Call ``tend`` until ``condition()`` is true. Return the time at that moment. Raises TooLateError."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TooLateError(f"{event}: not within {timeout_s:g} s; {self.last_words()}")
            self.tend()
            time.sleep(POLL_S)
        return time.time()

    def has_ended(self, *nodes: int) -> bool:
        """Return whether the launchers of these nodes (by default, of all nodes) have ended."""
        return not any(node in self.processes for node in nodes or range(NODES))

    def steps(self, rank: int, since: float = 0.0) -> list[Step]:
        """Return the steps that the processes of a rank have finished since the time ``since``."""
        steps = []
        for path in (self.folder / "steps").glob(f"{rank}.*"):
            lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            steps += [Step(at=float(at), step=int(step)) for at, step in lines]
        return sorted((step for step in steps if step.at > since), key=lambda step: step.at)

    def reached(self, step: int) -> bool:
        """Return whether every rank has finished step ``step``."""
        return all(any(made.step >= step for made in self.steps(rank)) for rank in WORLD)

    def pids(self, rank: int) -> list[int]:
        """Return the pids of all processes that this rank has had, in the order of their last finished steps."""
        paths = sorted((self.folder / "steps").glob(f"{rank}.*"), key=lambda path: path.stat().st_mtime)
        return [int(path.suffix[1:]) for path in paths]

    def first_steps_of_new(self, old: dict[int, list[int]]) -> list[Step] | None:
        """Return the first step of each rank's new process, or None if a rank has no such step yet.

        A process is new if ``old`` does not list it."""
        firsts = []
        for rank in WORLD:
            made = [
                path.read_text().partition("\n")
                for path in (self.folder / "steps").glob(f"{rank}.*")
                if int(path.suffix[1:]) not in old[rank]
            ]
            lines = [line.split() for line, end, _ in made if end]
            if not lines:
                return None
            firsts.append(max((Step(at=float(at), step=int(step)) for at, step in lines), key=lambda made: made.at))
        return firsts

    def home(self, node: int) -> Path:
        """Return the folder in which a node's launcher starts. If it has a sitecustomize.py, Python runs that first."""
        return self.folder / f"home-{node}"

    @contextlib.contextmanager
    def beside(self, node: int, *command: str) -> Iterator[int]:
        """Run another command on the machine of a node while the block runs. Yield the pid of the command."""
        with subprocess.Popen(
            self.machines[node].command(*command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                yield process.pid
            finally:
                process.kill()

    def said_by(self, node: int) -> Path:
        """Return the file with the stderr of a node's launcher and ranks. Each start of the node appends to it."""
        return self.folder / f"said-by-{node}"

    def words(self, node: int) -> list[str]:
        """Return the lines that a node's launcher wrote, without those of its ranks."""
        with contextlib.suppress(FileNotFoundError):
            lines = self.said_by(node).read_text(errors="replace").splitlines()
            return [line for line in lines if SPOKEN.match(line)]
        return []

    def last_words(self) -> str:
        return "; ".join(f"node {node} said last: {''.join(self.words(node)[-1:])}" for node in range(NODES))

    def state(self, node: int) -> NodeState | None:
        with contextlib.suppress(OSError, ValueError):
            return read_node((self.folder / f"node-{node}" / "node.json").read_text())
        return None

    def outcome(self, node: int) -> Outcome | None:
        with contextlib.suppress(OSError, ValueError):
            return read_outcome((self.folder / f"node-{node}" / "outcome.json").read_text())
        return None

    def metrics(self, node: int) -> str:
        """Return the text of a node's /metrics now, or an empty text if the node does not serve it."""
        state = self.state(node)
        if state is None or state.metrics is None:
            return ""
        get = "import sys, urllib.request as u; sys.stdout.buffer.write(u.urlopen(sys.argv[1], timeout=5).read())"
        command = self.machines[node].command(sys.executable, "-I", "-S", "-c", get, state.metrics)
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=20).stdout

    def alive(self) -> list[int]:
        """Return the pids of all processes on the machines."""
        return [pid for machine in self.machines for pid in machine.pids()]

    def weights(self) -> dict[str, str]:
        """Return the sha256 of each rank's final weights."""
        return {path.name: path.read_text() for path in (self.folder / "weights").glob("*")}


@contextlib.contextmanager
def start_job(folder: Path, *, prefix: str = "faults", spares: int = 0, **rest: object) -> Iterator[Job]:
    """Yield a job on new machines, and end it afterwards. ``spares`` is the number of additional machines."""
    folder.mkdir(parents=True, exist_ok=True)
    with lab.machines(NODES + spares, prefix=prefix) as machines:
        made = Job(machines=machines, folder=folder, **rest)  # type: ignore[arg-type]
        try:
            yield made
        finally:
            for machine in machines:
                machine.kill()
            for process in made.processes.values():
                process.wait(10)
