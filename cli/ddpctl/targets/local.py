"""The target ``local``: every node is a ddprun of its own on this machine's loopback.

With GPUs each node gets its own share of them; without, its ranks are CPU processes under gloo. The node's
side (locks, logs, signals, a free port) is ``python -m ddprun.nodectl``, run as any other command.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Annotated

from ddpctl.command import Command, Output, Verb
from ddpctl.errors import CannotWriteError, ConfigError, NoInputError, UnavailableError
from ddpctl.local_script import LOOPBACK, render_script
from ddpctl.look import TIMEOUT_S, Look, Seen
from ddpctl.plan import Plan, contract, counted, ddprun_args, script_of
from ddpctl.run import Run, RunStatus, fold, report_of
from ddpctl.script import find_script
from ddpctl.secrets import read_secrets
from ddpctl.spec import Doc, JobSpec
from ddpctl.targets import LogQuery, Submission
from ddpwire import folder, names
from ddpwire.exits import Exit
from ddpwire.targets import TARGETS

YOUNG_S = 5.0  # how long a launch may take from its record to its first process
STOP_MARGIN_S = 5.0  # what a ddprun may take beyond its ranks' grace
KILL_WAIT_S = 5.0
_OF_CONTAINERS = ("image", "cpus", "memory", "shm", "mounts")
GPU_PROBES = (
    Command(argv=("printenv", "CUDA_VISIBLE_DEVICES"), probe=True),
    Command(argv=("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"), probe=True),
)


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """The options of a target of kind local."""

    python: Annotated[
        str, Doc("The Python that runs the ranks, with torch installed; empty: the one that runs ddpctl.")
    ] = ""


class LocalTarget:
    """Nodes as processes of this machine."""

    def __init__(self, options: LocalOptions) -> None:
        self.options = options
        self._python = options.python or sys.executable

    def render(self, plan: Plan) -> str:
        """A bash script that does what ``submit`` does, attached to its terminal."""
        return render_script(plan, self.options.python or "python3")

    def expect(self, plan: Plan) -> Verb[None]:
        """The script runs where the project is."""
        return find_script(plan)

    def submit(self, plan: Plan, *, attached: bool) -> Verb[Submission]:
        """Look what this machine has, choose the port, start one ddprun a node."""
        job = plan.job
        yield from read_secrets(job)  # they are in the environment that a node inherits, or it is an error
        visible, listing, torch, port, *script = yield self._probes(plan)
        if torch.returncode:
            raise UnavailableError(_no_torch(self._python, torch))
        if script and script[0].returncode:
            raise NoInputError(f"{script_of(job.command)}: no such script in {plan.cwd}")
        if port.returncode:
            raise UnavailableError(_last_line(port, "no free port"))
        gpus = share_gpus(job, gpus_of(visible, listing))
        number = port.stdout.strip() if port.stdout.startswith("<") else str(json.loads(port.stdout)["port"])
        yield tuple(
            Command(
                argv=(self._python, "-P", "-m", "ddprun", *ddprun_args(plan)),
                env={
                    **job.env,
                    **contract(plan, node=node, addr=LOOPBACK, port=number),
                    names.NODES_HERE: str(job.max_nodes),
                    names.TARGETS_DIR: str(PurePath(plan.run_dir).parent / TARGETS),
                    names.LAUNCHER: "local",
                    names.DEVICE: "cuda" if gpus else "cpu",
                    "CUDA_VISIBLE_DEVICES": ",".join(gpus[node]) if gpus else "",
                },
                cwd=plan.cwd,
                mode="background",
                output=str(PurePath(plan.run_dir) / folder.node_name(node) / folder.NODE_LOG),
                tether=attached,
            )
            for node in range(job.max_nodes)
        )
        notes = (
            [] if gpus or job.device == "cpu" else [f"no GPU here: {counted(plan.world_size, 'CPU rank')} under gloo"]
        )
        if unused := [name for name in _OF_CONTAINERS if getattr(job, name) != getattr(JobSpec(), name)]:
            notes.append(f"no container here: {', '.join(unused)} not used")
        return Submission(handle={"port": number}, note="; ".join(notes))

    def _probes(self, plan: Plan) -> tuple[Command, ...]:
        want = ("--want", str(plan.job.port)) if plan.job.port else ()
        script = script_of(plan.job.command)
        find_torch = (
            "import importlib.util as u; raise SystemExit(not (u.find_spec('torch') and u.find_spec('ddprun')))"
        )
        return (
            *GPU_PROBES,
            Command(argv=(self._python, "-c", find_torch), probe=True),
            Command(argv=(self._python, "-P", "-m", "ddprun.nodectl", "port", *want), placeholder="<port>"),
            *((Command(argv=("test", "-f", script), cwd=plan.cwd, probe=True),) if script else ()),
        )

    def status(self, runs: tuple[Run, ...], *, now: float) -> Verb[tuple[RunStatus, ...]]:
        """Ask every node's folder."""
        dirs = tuple(path for run in runs for path in node_dirs(run))
        (shown,) = yield (Command(argv=(self._python, "-P", "-m", "ddprun.nodectl", "show", *dirs)),)
        if shown.returncode:
            raise UnavailableError(f"cannot ask the nodes: {_last_line(shown, 'nodectl failed')}")
        lines = iter(shown.stdout.splitlines())
        return tuple(
            fold(
                run.name,
                tuple(report_of(node, json.loads(next(lines))) for node in range(run.job.max_nodes)),
                young=now - run.created < YOUNG_S,
            )
            for run in runs
        )

    def logs(self, run: Run, query: LogQuery) -> Verb[None]:
        """Print the nodes' logs, or some ranks'."""
        options = ["--follow"] if query.follow else []
        options += [f"--node={node}" for node in query.nodes] + [f"--rank={rank}" for rank in query.ranks]
        options += [] if query.tail is None else [f"--tail={query.tail}"]
        argv = (self._python, "-P", "-m", "ddprun.nodectl", "logs", *options, run.folder)
        (done,) = yield (Command(argv=argv, mode="stream", timeout_s=None),)
        if done.returncode == Exit.NO_INPUT:
            last = run.job.max_nodes * run.job.gpus - 1
            raise NoInputError(
                f"{run.name} has no such log: its nodes are 0 to {run.job.max_nodes - 1}, its ranks 0 to {last}"
            )
        if done.returncode == Exit.CANNOT_WRITE:
            raise CannotWriteError("")  # nodectl has said it

    def look(self, run: Run, look: Look) -> Verb[tuple[Seen, ...]]:
        """Ask nodectl: it reads the nodes' folders, and fetches."""
        options = ["--metrics"] if look.metrics else []
        options += [f"--file={name}" for name in look.files]
        argv = ("look", "--bytes", str(look.max_bytes), *options, *node_dirs(run))
        (shown,) = yield (Command(argv=(self._python, "-P", "-m", "ddprun.nodectl", *argv), timeout_s=TIMEOUT_S),)
        if shown.returncode:
            raise UnavailableError(f"cannot ask the nodes: {_last_line(shown, 'nodectl failed')}")
        answers = map(json.loads, shown.stdout.splitlines())
        return tuple(Seen(node=node, **answer) for node, answer in enumerate(answers))

    def stop(self, run: Run, *, kill: bool, wait: bool = True) -> Verb[bool]:
        """Signal every ddprun and wait until none is alive."""
        wait_s = 0 if not wait else KILL_WAIT_S if kill else run.job.grace + STOP_MARGIN_S
        argv = ("--signal", "KILL" if kill else "TERM", "--wait", f"{wait_s:g}", *node_dirs(run))
        command = Command(argv=(self._python, "-P", "-m", "ddprun.nodectl", "signal", *argv), timeout_s=wait_s + 10)
        (done,) = yield (command,)
        if done.returncode:
            raise UnavailableError(f"cannot stop {run.name}: {_last_line(done, 'nodectl failed')}")
        return not any(json.loads(line)["alive"] for line in done.stdout.splitlines())

    def execute(self, run: Run, *, node: int, argv: tuple[str, ...], tty: bool) -> Verb[int]:
        """Run it in the run's project folder, with the run's variables; every node is this machine."""
        env = contract(_plan(run), node=node, addr=LOOPBACK, port=str(run.handle["port"]))
        command = Command(argv=argv or ("/bin/sh",), env={**run.job.env, **env}, cwd=run.cwd)
        (done,) = yield (replace(command, mode="tty" if tty else "stream", timeout_s=None),)
        return done.returncode


def _plan(run: Run) -> Plan:
    return Plan(run=run.name, job=run.job, cwd=run.cwd, run_dir=run.folder, checkpoint_dir=run.checkpoint_dir)


def node_dirs(run: Run) -> tuple[str, ...]:
    """The folders of a run's nodes, by node."""
    return tuple(str(PurePath(run.folder) / folder.node_name(node)) for node in range(run.job.max_nodes))


def find_gpus() -> Verb[tuple[str, ...]]:
    """Which GPUs this machine has."""
    visible, listing = yield GPU_PROBES
    return gpus_of(visible, listing)


def gpus_of(visible: Output, listing: Output) -> tuple[str, ...]:
    """The GPUs of this machine: what CUDA_VISIBLE_DEVICES leaves, else nvidia-smi's list."""
    if visible.returncode == 0:
        return tuple(part.strip() for part in visible.stdout.split(",") if part.strip() not in ("", "-1"))
    return tuple(listing.stdout.split()) if listing.returncode == 0 else ()


def share_gpus(job: JobSpec, gpus: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Each node's own GPUs; empty: CPU ranks. Raises ConfigError when there are too few."""
    need = job.max_nodes * job.gpus
    if job.device == "cpu" or (job.device == "auto" and not gpus):
        return ()
    if len(gpus) < need:
        asked = f"{counted(job.max_nodes, 'node')} x {counted(job.gpus, 'GPU')}"
        insists = "--device cuda: " if job.device == "cuda" else ""
        raise ConfigError(
            f"{insists}{asked}: {need} needed, this machine has {len(gpus) or 'none'}: "
            "ask for fewer, or --device cpu for CPU ranks"
        )
    return tuple(gpus[node * job.gpus : (node + 1) * job.gpus] for node in range(job.max_nodes))


def _no_torch(python: str, output: Output) -> str:
    if output.returncode == Exit.SCRIPT:
        return f"{python} has no torch: install it with {python} -m pip install 'ddpctl[train]'"
    return f"cannot run {python}: {_last_line(output, 'it failed')}: set the target's 'python' to one with torch"


def _last_line(output: Output, otherwise: str) -> str:
    lines = output.stderr.strip().splitlines()
    return lines[-1] if lines else otherwise
