"""Runs a script again and again on CPU ranks of this machine, each time with one disturbance (``ddpctl rehearse``).

``python -m ddprun.rehearsal PLAN`` reads a plan as JSON, which ddpctl.commands.rehearse writes, and writes the facts
of all runs beside it. It imports torch once. Each node is a ddprun that is forked from this process, with folders of
its own: ``project`` (a copy, and the current folder of the ranks), ``checkpoints`` and ``tmp``. The observers of the
ranks (ranks/observer.py) write their facts into the folder of the run.

``python -m ddprun.rehearsal JSON --record`` is the only rank of a run on a target. It starts the program above without
the variables of this run, and prints the facts as a record (ddpwire.log_record).
"""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ddprank.heartbeat import HEARTBEAT_FILE
from ddprun.ranks import fork_server
from ddprun.ranks.process_groups import OWN_STORE
from ddprun.settings.node_config import STOP_SIGNALS
from ddprun.system import compat, network, processes
from ddpwire import log_record, names
from ddpwire.events import EVENTS_FILE
from ddpwire.exits import Exit
from ddpwire.run_files import OUTCOME, node_name
from ddpwire.work_folder import END_S, PLAN, work_folder

POLL_S = 0.05  # of processes and files of this machine, which costs little
IDLE_S, IDLE_FACTOR = 20.0, 3  # without a fact: it hangs; at least this many times the longest pause before
LIMIT_FACTOR = 10  # of a run that still takes steps, to the undisturbed run
EXCEPTION_LIMIT_S = 20.0  # within which all ranks have to end after an exception of one of them
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
    "ranks": "a second launch with fewer ranks",
}
WAIT, DONE = ("", "") if sys.stderr.isatty() else ("\n", "rehearse:  ")  # logs are sent by lines
# Variables that a launcher, ddprun or torchrun sets: another ddprun would believe them. A user may have LOCAL_TOKEN.
OF_A_RUN = re.compile(
    "(PET|TORCHELASTIC|SLURM|SRUN)_|(OMP_NUM_THREADS|ROLE_(NAME|RANK|WORLD_SIZE)|TORCH_FR_DUMP_TEMP_FILE|"
    "(GLOO|NCCL)_SOCKET_IFNAME|"
    + "|".join(
        [HEARTBEAT_FILE, EVENTS_FILE, OWN_STORE, *(text for text in vars(names).values() if str(text).isupper())]
    )
    + ")$"
)
TEMPORARY = ("/tmp/", "/var/tmp/", "/dev/shm/")  # noqa: S108 (where scripts leave files)


class Rehearsal:
    """The folders of the nodes, and the facts of the runs so far."""

    def __init__(self, plan: Any) -> None:
        self.plan, self.work, self.runs = plan, Path(plan.work), list[dict[str, Any]]()
        self.gpus = 0  # of a node, in whose place the script gets CPUs
        self.limit_s, self.idle_s = math.inf, plan.idle_s  # for the undisturbed run, whose speed is unknown

    def node(self, number: int) -> Path:
        """Return the folder of a node."""
        return self.work / node_name(0 if self.plan.shared else number)

    def perform(self) -> None:
        """Run all scenarios."""
        plan = self.plan
        plain = self._run("plain")
        if not any(process["step"] for process in plain["processes"]):
            self.gpus, plain["scenario"] = self.plan.gpus, "gpus"
            plain = self._run("plain")
        self._write()
        if not any(process["step"] for process in plain["processes"]):
            return  # nothing can be compared
        if (plain["hung"] or any(plain["codes"])) and not any(process["cut"] for process in plain["processes"]):
            return  # it fails by itself
        times = sorted(fact["time"] for process in plain["processes"] for kind in KINDS for fact in process[kind])
        self.idle_s = max(IDLE_S, IDLE_FACTOR * max((b - a for a, b in itertools.pairwise(times)), default=0.0))
        self.limit_s = LIMIT_FACTOR * plain["seconds"] + self.idle_s + plan.grace_s
        self._run("again")
        self._write()
        last = plan.nodes * plan.ranks - 1
        acts = {"kill-rank": ("kill", last), "slow": ("sleep", last), "disk": ("disk", None), "raise": ("raise", last)}
        for name in plan.scenarios:
            do, rank = acts.get(name, ("wait", None))
            run = self._run(name, act={"do": do, "rank": rank, "step": middle_step(plain)})
            if name == "term" and last:
                self._copy(self.work, self.work / "stopped")
            if name in ("term", "disk") or (name.startswith("kill") and any(run["codes"])):
                self._run("resume", after=name)
            if name == "term" and last:
                self._copy(self.work / "stopped", self.work)
                self._run("ranks", after=name)
            self._write()

    def _write(self) -> None:
        """Write the facts of all scenarios so far: ddpctl reads them even if it is interrupted."""
        facts = self.work / "facts.new"
        facts.write_text(json.dumps(self.runs))
        facts.rename(self.work / "facts.json")

    def _copy(self, source: Path, target: Path) -> None:
        for node in {self.node(number).name for number in range(self.plan.nodes)}:
            shutil.rmtree(target / node, ignore_errors=True)
            with contextlib.suppress(shutil.Error):  # sockets, which processes have left in TMPDIR, cannot be copied
                shutil.copytree(source / node, target / node, symlinks=True)

    def reset(self, number: int) -> None:
        """Put a node's folder into the state before its first run."""
        node = self.node(number)
        shutil.rmtree(node, ignore_errors=True)
        for name in ("project", "checkpoints", "tmp", "runtime"):
            (node / name).mkdir(parents=True)
        for name in (*self.plan.files, *self.plan.links):
            source, target = Path(self.plan.project, name), node / "project" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in self.plan.links:
                target.symlink_to(source)
            else:
                shutil.copy2(source, target, follow_symlinks=False)

    def _run(self, name: str, *, act: Mapping[str, Any] | None = None, after: str = "") -> dict[str, Any]:
        nodes, ranks = self.plan.nodes, self.plan.ranks
        if name == "ranks":
            nodes, ranks = (nodes - 1, ranks) if nodes > 1 else (1, ranks - 1)
        title = f"{TITLES[name]}{f' after {TITLES[after]}' if after else ''}"
        title += f", at step {act['step']}" if act else ", with CPUs in place of GPUs" if self.gpus else ""
        _say(f"rehearse: {title} ...{WAIT}")
        for number in () if after else range(nodes):
            self.reset(number)
        folder = self.work / f"run-{len(self.runs)}"
        # The first starts get equal seeds, so that they can be compared. A second start gets others, as on a cluster.
        seed = 1000 * len(self.runs) if after else 0
        observing = {"facts": str(folder / "facts"), "steps": self.plan.steps, "act": act or {}, "seed": seed}
        observing["gpus"] = self.gpus
        began, run = time.time(), Run(self, folder, nodes, ranks, observing)
        hung = not run.follow(name)
        record = {"scenario": name, "after": after, "act": act or {}, "nodes": nodes, "ranks": ranks, "began": began}
        record |= {"seconds": time.time() - began, "signalled": run.signalled, "hung": hung, "outcome": run.outcome()}
        record |= {"codes": [*run.codes.values()], "processes": read_facts(folder / "facts")}
        record["left"] = self._left(record["processes"])
        self.runs.append(record)
        _say(f"{DONE} {record['seconds']:.1f} s{', ended by force' if hung else ''}\n")
        return record

    def _left(self, ranks: list[dict[str, Any]]) -> list[str]:
        """Remove the temporary files and shared memory that a run has left, and return their paths."""
        files = {path for path in new_files(ranks) if not path.is_relative_to(self.work)}
        for process in ranks:
            files |= {*Path("/dev/shm").glob(f"torch_{process['start'][0]['pid']}_*")}  # noqa: S108
        files |= {path for node in self.work.glob("node-*") for path in (node / "tmp").rglob("*")}
        files = {path for path in files if path.is_file()}
        for path in files:
            with contextlib.suppress(OSError):
                path.unlink()
        return sorted(map(str, files))


class Run:
    """One start of all nodes."""

    def __init__(
        self, rehearsal: Rehearsal, folder: Path, nodes: int, ranks: int, observing: Mapping[str, Any]
    ) -> None:
        self._rehearsal, self._folder, self._facts = rehearsal, folder, Path(observing["facts"])
        self._nodes, self._ranks, self._observing = nodes, ranks, observing
        self._port = network.free_port("127.0.0.1")
        self._pids: dict[int, int] = {}
        self.codes: dict[int, int | None] = {}  # of the nodes; None: it runs
        self.signalled = 0.0  # when the nodes were disturbed

    def follow(self, name: str) -> bool:
        """Start the nodes and wait for their end. Return False if they had to be killed."""
        self._facts.mkdir(parents=True)
        for node in range(self._nodes):
            self._start(node)
        began = changed = time.monotonic()
        size, limit_s, idle_s = -1, self._rehearsal.limit_s, self._rehearsal.idle_s
        while self._is_alive():
            texts, now = [path.read_bytes() for path in self._facts.glob("*.*")], time.monotonic()
            if (grown := sum(map(len, texts))) != size:
                size, changed = grown, now
            training, reached = (sum(b'\n{"%s": ' % kind in text for text in texts) for kind in (b"begin", b"at"))
            if not self.signalled and reached and (name == "raise" or reached == training):
                self.signalled, changed = time.time(), now
                self._disturb(name)
                if name == "raise":
                    limit_s = now - began + EXCEPTION_LIMIT_S
                idle_s = max(idle_s, (self._rehearsal.plan.grace_s + 10.0) * (name in SIGNALS))  # ddprun kills them
            if now - began > limit_s or now - changed > idle_s:
                for pid in self._pids.values():
                    processes.kill(pid, signal.SIGKILL)
                break
            time.sleep(POLL_S)
        processes.kill_all(partial(processes.descendants, os.getpid()), timeout_s=10.0, reap=processes.reap_all)
        return None not in self.codes.values()

    def _disturb(self, name: str) -> None:
        for pid in self._pids.values() if name in SIGNALS else ():
            processes.kill(pid, SIGNALS[name])
        if name == "kill-node":
            node = max(self._pids)
            processes.kill(self._pids[node], signal.SIGKILL)
            os.waitpid(self._pids[node], 0)
            if node and not self._rehearsal.plan.shared:
                self._rehearsal.reset(node)
            self._start(node)
        (self._facts / "go").touch()

    def _start(self, node: int) -> None:
        """Fork a ddprun."""
        self.codes[node], self._pids[node] = None, processes.fork(partial(self._become, node))

    def _become(self, node: int) -> None:
        plan, place = self._rehearsal.plan, self._rehearsal.node(node)
        os.setsid()
        log = os.open(self._folder / f"log-{node}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for target, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(descriptor, target)
        os.chdir(place / "project")
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # as in __main__
            signal.signal(number, signal.SIG_IGN)
        os.environ |= {names.REHEARSAL: json.dumps(self._observing), names.CHECKPOINT_DIR: str(place / "checkpoints")}
        os.environ |= {names.NODES_HERE: str(self._nodes), names.LAUNCHER: "local", names.DEVICE: "cpu"}
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(place / "tmp")}
        os.environ |= dict.fromkeys(("XDG_RUNTIME_DIR", "TORCHINDUCTOR_CACHE_DIR"), str(place / "runtime"))
        run_dir = self._folder / (place.name if plan.shared else f"of-{place.name}")
        options = {"--nnodes": self._nodes, "--nproc-per-node": self._ranks, "--node-rank": node, "--run-dir": run_dir}
        options |= {"--master-addr": "127.0.0.1", "--master-port": self._port, "--run-id": self._folder.name}
        options |= {"--grace": plan.grace_s}
        sys.argv = ["ddprun", *(str(word) for pair in options.items() for word in pair), *plan.command]
        from ddprun.main import main

        main()

    def _is_alive(self) -> bool:
        for node, pid in self._pids.items():
            if self.codes[node] is None and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                self.codes[node] = os.waitstatus_to_exitcode(ended[1])
        return None in self.codes.values()

    def outcome(self) -> str:
        """Return ddprun's sentence about a run that failed."""
        for path in sorted(self._folder.rglob(OUTCOME)):
            with contextlib.suppress(OSError, ValueError):
                if (record := json.loads(path.read_bytes())).get("code"):
                    return str(record.get("message", ""))
        return ""


def new_files(ranks: list[dict[str, Any]]) -> set[Path]:
    """Return the temporary files that did not exist when the first rank opened them to write."""
    opened: dict[str, bool] = {}
    for file in sorted((file for process in ranks for file in process["file"]), key=lambda file: file["time"]):
        opened.setdefault(file["file"], file["existed"])
    return {Path(path) for path, existed in opened.items() if path.startswith(TEMPORARY) and not existed}


def middle_step(run: Mapping[str, Any]) -> int:
    """Return the step at which to disturb: in the second half of the run, between two saves if there are any."""
    last = min(len(process["step"]) for process in run["processes"] if process["step"])
    saves = sorted({save["step"] for process in run["processes"] for save in process["save"] if not save["error"]})
    gaps = [(low + high) // 2 for low, high in itertools.pairwise([*saves, last]) if high - low > 1]
    return min(gaps, key=lambda step: abs(step - 0.6 * last), default=max(1, int(0.6 * last)))


KINDS = ("start", "group", "loader", "begin", "step", "epoch", "save", "load", "file", "at", "error", "cut", "end")


def read_facts(folder: Path) -> list[dict[str, Any]]:
    """Return the facts of each process, grouped by their kind."""
    ranks = []
    for path in sorted(folder.glob("*.*")):
        process: dict[str, Any] = {kind: [] for kind in KINDS}
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the process was killed while it wrote
                fact = json.loads(line)
                process[next(iter(fact))].append(fact)
        group, start = process["group"], process["start"]
        if not start:
            continue  # it was killed before its first fact
        ranks.append({"rank": group[0]["group"] if group else start[0]["start"], **process})
    return ranks


def _say(text: str) -> None:
    print(text, file=sys.stderr, end="", flush=True)


def project_files(plan: Mapping[str, Any]) -> list[str]:
    """Return the files of the current folder that each node gets. Raises OSError, or ValueError if they are too large.

    The Python code ``list`` selects them. If it is empty, the folder has no other files.
    """
    for name in (*plan["links"], *([] if plan["command"][0] == "-m" else plan["command"][:1])):
        if not Path(name).exists():
            raise FileNotFoundError(f"{name}: no such file in {Path.cwd()}")
    if plan["list"]:
        argv = [sys.executable, "-P", "-c", plan["list"]]
        listing: Any = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout)
        names, left_out = listing["files"], listing["left_out"]
    else:
        names, left_out = [str(path) for path in Path().rglob("*") if path.is_symlink() or not path.is_dir()], []
    sizes = {
        name: os.lstat(name).st_size
        for name in names
        if not any(Path(name).is_relative_to(link) for link in plan["links"])
    }
    if (total := sum(sizes.values())) > plan["max_bytes"]:
        largest = max(sizes, key=lambda name: sizes[name]).partition("/")[0]
        limit = f"each node gets a copy of at most {plan['max_bytes'] / 1e6:.0f} MB"
        raise ValueError(
            f"the project has {total / 1e6:.0f} MB, and {limit}: link what is read, as by --link {largest}"
        )
    for line in left_out:
        if not any(link in line for link in plan["links"]):
            _say(f"rehearse: not copied for the nodes: {line}; --link PATH shares what is only read\n")
    return [*sizes]


def rehearse_in_rank(plan: Mapping[str, Any]) -> int:
    """Rehearse the project in the current folder, and print the facts as a record. Return the exit code.

    A signal ends the rehearsal, and the record then has its number. Nothing is left.
    """
    stops = list[int]()
    for number in (signal.SIGINT, signal.SIGHUP, *STOP_SIGNALS.values()):
        signal.signal(number, lambda number, _: stops.append(number))
    processes.adopt_orphans()
    parent, code, runs = os.getpid(), None, list[Any]()
    with work_folder(plan) as work:
        env = {name: value for name, value in os.environ.items() if name in plan["env"] or not OF_A_RUN.match(name)}
        argv = [sys.executable, "-P", "-m", "ddprun.rehearsal", str(work / PLAN)]
        env |= {"TMPDIR": str(work)}
        pid = processes.fork(partial(os.execve, sys.executable, argv, env))
        while not stops and code is None:
            ended, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else None
            time.sleep(POLL_S)
        processes.kill_all(partial(processes.descendants, parent), timeout_s=END_S, reap=processes.reap_all)
        with contextlib.suppress(OSError, ValueError):
            runs = json.loads((work / "facts.json").read_bytes())
    by = int(stops[0]) if stops else 0
    if runs or by:
        print(*log_record.pack_result({"runs": runs, "signal": by}), sep="\n", flush=True)
    return 128 + by if by else Exit.OK if runs else max(code or 0, 0) or Exit.SOFTWARE


def main() -> None:
    """Rehearse the plan in the file that the argument names, or in the argument itself."""
    if sys.argv[2:] == ["--record"]:
        sys.exit(rehearse_in_rank(json.loads(sys.argv[1])))
    plan = json.loads(Path(sys.argv[1]).read_bytes())
    try:
        plan |= {"project": str(Path.cwd()), "files": project_files(plan)}
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _say(f"rehearse: {error}\n")
        sys.exit(Exit.NO_INPUT if isinstance(error, FileNotFoundError) else Exit.CONFIG)
    rehearsal = Rehearsal(SimpleNamespace(**plan))
    processes.adopt_orphans()
    _say(f"rehearse: importing torch ...{WAIT}")
    began = time.monotonic()
    fork_server.preload_torch(1)
    compat.import_dynamo()
    import torch.distributed.checkpoint
    import torch.nn.parallel  # noqa: F401

    _say(f"{DONE} {time.monotonic() - began:.1f} s\n")
    rehearsal.perform()


if __name__ == "__main__":
    main()
