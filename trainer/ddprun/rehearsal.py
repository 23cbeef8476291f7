"""Runs a script again and again on CPU ranks of this machine, each time with one disturbance (``ddpctl rehearse``).

``python -m ddprun.rehearsal PLAN`` reads a Plan as JSON, and writes the facts of all runs into the plan's folder. It
imports torch once. Each node is a ddprun that is forked from this process, in a folder of its own:

WORK/node-0/project      a copy of the project, the current folder of the ranks
WORK/node-0/checkpoints  DDP_CHECKPOINT_DIR
WORK/node-0/tmp          TMPDIR
WORK/RUN/facts           what the observers of the ranks have recorded (ranks/observer.py)
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ddprun.ranks import fork_server
from ddprun.system import compat, network, processes
from ddpwire import names
from ddpwire.run_files import OUTCOME, node_name

POLL_S = 0.05
LIMIT_S = 600.0  # for the first run, whose speed is unknown
IDLE_S = 20.0  # without a fact, and at least this many times the longest pause of the undisturbed run:
IDLE_FACTOR = 5
EXCEPTION_LIMIT_S = 20.0  # within which all ranks end after an exception of one of them
SIGNALS = {"term": signal.SIGTERM, "usr1": signal.SIGUSR1, "int": signal.SIGINT}
TITLES = {
    "plain": "undisturbed",
    "again": "undisturbed, a second time",
    "term": "SIGTERM to all ranks",
    "usr1": "SIGUSR1 to all ranks",
    "int": "Ctrl-C",
    "kill-rank": "SIGKILL of a rank",
    "kill-node": "SIGKILL of a node, which returns without its files",
    "slow": "a slow rank",
    "disk": "a full disk during a save",
    "raise": "an exception in a rank",
    "resume": "a second launch",
    "ranks": "a second launch with another number of ranks",
}
WATCHED = ("project", "checkpoints")  # of a node: what the script may save


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to rehearse. ``scenarios`` are keys of TITLES."""

    work: str
    project: str
    files: Sequence[str]  # relative to the project
    links: Sequence[str]  # files and folders of the project that the nodes share, such as data
    command: Sequence[str]  # what follows ddprun's options
    nodes: int
    ranks: int  # of each node
    steps: int
    grace_s: float
    shared: bool
    scenarios: Sequence[str]


@dataclass(kw_only=True)
class Rehearsal:
    """The folders of the nodes, and the runs so far."""

    plan: Plan
    runs: list[dict[str, Any]] = field(default_factory=list)
    idle_s: float = 60.0
    limit_s: float = LIMIT_S

    def node(self, number: int) -> Path:
        """Return the folder of a node."""
        return Path(self.plan.work, node_name(0 if self.plan.shared else number))

    def perform(self) -> None:
        """Run all scenarios."""
        plan, wanted = self.plan, self.plan.scenarios
        self._reset()
        plain = self._run("plain")
        pauses = [0.0, *_pauses(plain)]
        self.idle_s = max(IDLE_S, IDLE_FACTOR * max(pauses))
        self.limit_s = 3 * plain["seconds"] + self.idle_s + plan.grace_s
        if not any(process["step"] for process in plain["processes"]):
            return  # nothing can be compared
        self._reset()
        self._run("again")
        step, last = middle_step(plain), plan.nodes * plan.ranks - 1
        acts = {"kill-rank": ("kill", last), "slow": ("sleep", last), "disk": ("disk", None), "raise": ("raise", last)}
        for name in wanted:
            do, rank = acts.get(name, ("wait", None))
            self._reset()
            first = self._run(name, act={"do": do, "rank": rank, "step": step})
            if name == "term":
                stopped = self._snapshot()
                self._run("resume", after=name)
                if plan.nodes * plan.ranks > 1 and first["processes"]:
                    self._reset(stopped)
                    self._run("ranks", after=name)
                shutil.rmtree(stopped)
            elif name == "disk" or (name.startswith("kill") and any(first["codes"])):
                self._run("resume", after=name)

    def _reset(self, snapshot: Path | None = None) -> None:
        """Put the nodes' folders back into the state before the first run, or into that of a snapshot."""
        for number in range(1 if self.plan.shared else self.plan.nodes):
            node = self.node(number)
            shutil.rmtree(node, ignore_errors=True)
            for name in (*WATCHED, "tmp", "runtime"):
                (node / name).mkdir(parents=True)
            for name in self.plan.files:
                source, target = Path(self.plan.project, name), node / "project" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
            for name in self.plan.links:
                (node / "project" / name).parent.mkdir(parents=True, exist_ok=True)
                (node / "project" / name).symlink_to(Path(self.plan.project, name))
            if snapshot:
                for name in WATCHED:
                    shutil.copytree(snapshot / node.name / name, node / name, symlinks=True, dirs_exist_ok=True)

    def _snapshot(self) -> Path:
        folder = Path(self.plan.work, "snapshot")
        for number in range(1 if self.plan.shared else self.plan.nodes):
            for name in WATCHED:
                shutil.copytree(self.node(number) / name, folder / self.node(number).name / name, symlinks=True)
        return folder

    def _run(self, name: str, *, act: Mapping[str, Any] | None = None, after: str = "") -> dict[str, Any]:
        plan, number = self.plan, len(self.runs)
        nodes, ranks = plan.nodes, plan.ranks
        if name == "ranks":
            nodes, ranks = (nodes - 1, ranks) if nodes > 1 else (1, max(1, ranks - 1))
        step = f", at step {act['step']}" if act else ""
        print(f"rehearse: {TITLES[name]}{f' after {TITLES[after]}' if after else ''}{step} ...", file=sys.stderr, end="", flush=True)
        facts = Path(plan.work, f"run-{number}", "facts")
        facts.mkdir(parents=True)
        seed = 0 if not after else 10000 + number
        observing = {"facts": str(facts), "steps": plan.steps, "act": act or {}, "seed": seed}
        run = Run(rehearsal=self, folder=facts.parent, nodes=nodes, ranks=ranks, observing=observing)
        began = time.time()
        ended = run.follow(name)
        seconds = time.time() - began
        left = sorted(str(path) for node in range(nodes) for path in (self.node(node) / "tmp").rglob("*") if path.is_file())
        record = {
            "scenario": name, "after": after, "act": act or {}, "nodes": nodes, "ranks": ranks, "began": began,
            "seconds": seconds, "signalled": run.signalled, "hung": not ended, "codes": [*run.codes.values()],
            "outcome": run.outcome(), "processes": read_processes(facts), "tmp": left,
        }  # fmt: skip
        record["left"] = sorted(path for path in _written(record) if _is_temporary(path) and Path(path).exists())
        for path in record["left"]:
            Path(path).unlink(missing_ok=True)
        self.runs.append(record)
        print(f" {seconds:.1f} s{'' if ended else ', ended by force'}", file=sys.stderr, flush=True)
        return record


@dataclass(kw_only=True)
class Run:
    """One launch of all nodes."""

    rehearsal: Rehearsal
    folder: Path
    nodes: int
    ranks: int
    observing: Mapping[str, Any]
    codes: dict[int, int | None] = field(default_factory=dict)
    signalled: float = 0.0
    _pids: dict[int, int] = field(default_factory=dict)
    _returned: bool = False

    def follow(self, name: str) -> bool:
        """Start the nodes and wait for their end. Return False if they had to be killed."""
        port = network.free_port("127.0.0.1")
        for node in range(self.nodes):
            self._pids[node] = self._start(node, port)
        facts, began = self.folder / "facts", time.monotonic()
        size, changed, limit_s = -1, began, self.rehearsal.limit_s
        while self._reap():
            now, files = time.monotonic(), [*facts.iterdir()]
            if (grown := sum(file.stat().st_size for file in files)) != size:
                size, changed = grown, now
            if not self.signalled and name in (*SIGNALS, "kill-node", "raise") and self._has_reached(name, files):
                self.signalled, changed = time.time(), now
                limit_s = now - began + (EXCEPTION_LIMIT_S if name == "raise" else limit_s)
                self._disturb(name, port)
            waits_s = self.rehearsal.plan.grace_s + 10.0 if self.signalled and name in SIGNALS else 0.0
            if now - began > limit_s or now - changed > max(self.rehearsal.idle_s, waits_s):
                self._kill()
                return False
            time.sleep(POLL_S)
        processes.kill_descendants(os.getpid(), timeout_s=5.0, reap=processes.reap_all)
        return True

    def _has_reached(self, name: str, files: Sequence[Path]) -> bool:
        reached = sum(b'\n{"at": ' in file.read_bytes() for file in files)
        return reached >= (1 if name == "raise" else self.nodes * self.ranks) or reached == sum(
            b'\n{"begin": ' in file.read_bytes() for file in files if reached
        ) > 0

    def _disturb(self, name: str, port: int) -> None:
        if name == "kill-node":
            node = max(self._pids)
            processes.kill(self._pids[node], signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pids[node], 0)
            if not self.rehearsal.plan.shared and node:
                for part in WATCHED:
                    _clear(self.rehearsal.node(node) / part, keep=self.rehearsal.plan.files)
            self._pids[node] = self._start(node, port)
        elif name in SIGNALS:
            for pid in self._pids.values():
                processes.kill(pid, SIGNALS[name])
        (self.folder / "facts" / "go").touch()

    def _start(self, node: int, port: int) -> int:
        """Fork a ddprun."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._become_node(node, port, parent)
            finally:
                os._exit(1)
        return pid

    def _become_node(self, node: int, port: int, parent: int) -> NoReturn:
        plan, place = self.rehearsal.plan, self.rehearsal.node(node)
        os.setsid()
        processes.die_with_parent(parent)
        log = os.open(self.folder / f"log-{node}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(place / "project")
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # as in __main__
            signal.signal(number, signal.SIG_IGN)
        os.environ.update(
            {
                names.REHEARSAL: json.dumps(self.observing),
                names.CHECKPOINT_DIR: str(place / "checkpoints"),
                names.NODES_HERE: str(self.nodes),
                names.LAUNCHER: "local",
                names.DEVICE: "cpu",
                "CUDA_VISIBLE_DEVICES": "",
                "TMPDIR": str(place / "tmp"),
                "XDG_RUNTIME_DIR": str(place / "runtime"),
                "TORCHINDUCTOR_CACHE_DIR": str(place / "runtime"),
            }
        )
        run = self.folder if plan.shared else self.folder / f"of-{node_name(node)}"
        options = {
            "--nnodes": self.nodes, "--nproc-per-node": self.ranks, "--node-rank": node, "--master-addr": "127.0.0.1",
            "--master-port": port, "--run-dir": run, "--run-id": self.folder.name, "--grace": f"{plan.grace_s:g}",
        }  # fmt: skip
        sys.argv = ["ddprun", *(str(word) for pair in options.items() for word in pair), *plan.command]
        from ddprun.main import main

        main()

    def _reap(self) -> bool:
        """Note the exit codes of nodes that have ended. Return whether any is alive."""
        for node, pid in self._pids.items():
            if self.codes.get(node) is None:
                with contextlib.suppress(ChildProcessError):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    self.codes[node] = os.waitstatus_to_exitcode(status) if ended else None
        return None in self.codes.values()

    def _kill(self) -> None:
        for pid in self._pids.values():
            processes.kill(pid, signal.SIGKILL)
        processes.kill_descendants(os.getpid(), timeout_s=10.0, reap=processes.reap_all)

    def outcome(self) -> str:
        """Return ddprun's sentence about the end of the run."""
        for path in sorted(self.folder.rglob(OUTCOME)):
            with contextlib.suppress(OSError, ValueError):
                if (record := json.loads(path.read_bytes())).get("code"):
                    return str(record.get("message", ""))
        return ""


def middle_step(run: Mapping[str, Any]) -> int:
    """Return the step at which to disturb: in the second half of the run, between two saves if there are any."""
    last = min(len(process["step"]) for process in run["processes"] if process["step"])
    saves = sorted({save["step"] for process in run["processes"] for save in process["save"] if not save["error"]})
    gaps = [(low, high) for low, high in zip(saves, [*saves[1:], last], strict=True) if high - low > 1]
    if gaps:
        low, high = min(gaps, key=lambda gap: abs((gap[0] + gap[1]) / 2 - 0.6 * last))
        return (low + high) // 2
    return max(1, int(0.6 * last))


KINDS = ("start", "group", "ddp", "loader", "begin", "step", "epoch", "save", "load", "file", "at", "cut", "blind", "end")


def read_processes(folder: Path) -> list[dict[str, Any]]:
    """Return the facts of each process, grouped by their kind."""
    found = []
    for path in sorted(folder.glob("*.*")):
        process: dict[str, Any] = {kind: [] for kind in KINDS}
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the process was killed while it wrote
                fact = json.loads(line)
                process[next(iter(fact))].append(fact)
        found.append({"rank": (process["group"] or process["start"])[0][("group", "start")[not process["group"]]]} | process)
    return found


def _pauses(run: Mapping[str, Any]) -> list[float]:
    times = sorted(step["time"] for process in run["processes"] for step in process["step"])
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


def _written(record: Mapping[str, Any]) -> set[str]:
    files = {file["file"] for process in record["processes"] for file in process["file"]}
    pids = [process["start"][0]["pid"] for process in record["processes"]]
    return files | {str(path) for pid in pids for path in Path("/dev/shm").glob(f"torch_{pid}_*")}  # noqa: S108


def _is_temporary(path: str) -> bool:
    return path.startswith(("/tmp/", "/var/tmp/", "/dev/shm/"))  # noqa: S108


def _clear(folder: Path, keep: Sequence[str]) -> None:
    kept = {folder / name for name in keep}
    for path in [*folder.rglob("*")]:
        if (path.is_file() or path.is_symlink()) and path not in kept:
            path.unlink(missing_ok=True)


def main() -> None:
    """Rehearse the plan in the file that the argument names."""
    plan = Plan(**json.loads(Path(sys.argv[1]).read_bytes()))
    processes.adopt_orphans()
    print("rehearse: importing torch ...", file=sys.stderr, end="", flush=True)
    began = time.monotonic()
    fork_server.preload_torch(1)
    compat.import_dynamo()
    import torch.distributed.checkpoint
    import torch.nn.parallel  # noqa: F401

    print(f" {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    rehearsal = Rehearsal(plan=plan)
    try:
        rehearsal.perform()
    finally:
        Path(plan.work, "facts.json").write_text(json.dumps(rehearsal.runs))


if __name__ == "__main__":
    main()
