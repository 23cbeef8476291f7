"""The interface of all kinds of target (local, ssh, slurm, kubernetes, kaggle), and the registry of the kinds.

A target is a place where jobs run. It runs no commands itself. Its operations ("verbs") are generators: they yield
commands (``ddpctl.command``), receive their output, and return a value.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal, cast

from ddpctl.command import Host, Verb
from ddpctl.errors import ConfigError, NoInputError
from ddpctl.execution.node_probe import Probe, ProbeResult
from ddpctl.job.launch_plan import Plan
from ddpctl.job.spec import JobSpec
from ddpctl.job.values import from_record
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpwire.machine import enumerate_ranges
from ddpwire.run_files import NODE_LOG, rank_log, timed_log


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What the verb ``submit`` returns about a job that it has started."""

    handle: Mapping[str, Any]  # kept in the run's record, for the other verbs
    note: str = ""  # lines for the user about what ddpctl has chosen, separated by newlines
    table: tuple[str, ...] = ()  # lines for the user about each machine
    checkpoint_dir: str | None = None  # the folder of the checkpoints, if it is not that of the plan
    nodes: str | None = None  # how many nodes were started, if not the requested number


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """What the verb ``locate`` returns: whether the job of a launch exists."""

    state: Literal["exists", "absent", "unknown"]
    message: str = ""  # why it is unknown
    handle: Mapping[str, Any] = field(default_factory=dict)  # if it exists: the run's handle, as far as it is known
    is_whole: bool = True  # whether all nodes exist
    is_final: bool = False  # no request is under way any more, so a second answer would be the same


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What ``replace_lost`` returns about the lost nodes that it has restarted on spare machines."""

    handle: Mapping[str, Any]  # the run's handle, updated if any nodes were restarted
    nodes: tuple[int, ...] = ()
    note: str = ""  # one line for the user; empty if no node is lost


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """A GPU of a machine. A field is None if the machine does not report it."""

    uuid: str
    computes: bool  # whether a program computes on it
    run: str | None = None  # the run that uses it
    node: int | None = None  # the number of the run's machine; spares have the numbers after those of the nodes
    since: int | None = None  # by the machine's clock, in seconds since the epoch
    busy_percent: int | None = None
    memory_mib: int | None = None
    total_mib: int | None = None


@dataclass(frozen=True, kw_only=True)
class CpuRun:
    """A run that uses no GPUs."""

    run: str
    node: int
    since: int


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """A machine of a target, with its GPUs, the runs that use them, and the launches that wait for them."""

    host: str
    failure: str = ""  # why it does not answer; empty if it does
    time: int = 0  # the time by its clock, in seconds since the epoch
    load: float | None = None  # the average of the last minute, in processes
    cores: int | None = None
    gpus: tuple[GpuReport, ...] = ()
    cpu_runs: tuple[CpuRun, ...] = ()
    waiting: tuple[str, ...] = ()  # the launches that wait, in the order of the queue


@dataclass(frozen=True, kw_only=True)
class LogQuery:
    """The options of ``ddpctl logs``, which select lines of a run's logs."""

    follow: bool = False
    nodes: tuple[int, ...] = ()  # empty for all nodes
    ranks: tuple[int, ...] = ()  # empty for the complete output of the nodes
    tail: int | None = None  # how many of the last lines; None for all lines
    timestamps: bool = False  # each line begins with its time

    def files(self, run: Run) -> dict[int, dict[str, str]]:
        """Return the log files of each requested node. The name of a file is mapped to the prefix of its lines."""
        every = {node: run.job.ranks_on(node) for node in range(run.job.max_machines)}
        nodes = [node for node in every if not self.nodes or node in self.nodes]
        ranks = {node: [rank for rank in self.ranks if rank in every[node]] for node in nodes}
        return {node: self._files(node, ranks[node], every[node]) for node in nodes if ranks[node] or not self.ranks}

    def _files(self, node: int, ranks: list[int], every: range) -> dict[str, str]:
        if not self.timestamps:
            return {rank_log(rank): f"[node{node} rank{rank}] " for rank in ranks} or {NODE_LOG: ""}
        names = [timed_log(rank) for rank in ranks or (None, *every)]
        if self.tail is None and not self.follow:
            names += [name.replace(".log", ".1.log") for name in names]  # their earlier lines
        return dict.fromkeys(names, "")


def no_such_log(run: Run, query: LogQuery = LogQuery(), *, yet: bool = False) -> NoInputError:
    """Return the error for a log that does not exist, with the field ``no_such_log``. ``yet``: it may exist later."""
    job = run.job
    known = f"its nodes are 0 to {job.max_nodes - 1}, its ranks 0 to {job.world_size - 1}"
    if query.nodes and query.ranks and not job.spares:  # a spare may have the ranks of any node
        for node in range(job.max_nodes):
            if node in query.nodes or {*query.ranks}.intersection(job.ranks_on(node)):
                ranks = job.ranks_on(node)
                known += f"; node {node} has {'rank' if len(ranks) == 1 else 'ranks'} {enumerate_ranges(ranks)}"
    return NoInputError(f"run '{run.name}' has no such log{' yet' if yet else ''}: {known}", no_such_log=True)


Capability = Literal[
    "copies",  # nodes can keep copies of the checkpoints, because each node has its own disk
    "discovery",  # the nodes of its runs serve metrics, at addresses that they write into their files
    "hosts",  # its options list machines, which `ddpctl image ship` and `ddpctl provision` can reach
    "interrupt",  # ddpctl can send SIGINT to the ranks of its runs, as Ctrl-C does
    "pull",  # `ddpctl pull` fetches what its runs write
    "queue",  # its runs wait in a queue before their nodes start
    "spares",  # further machines can wait to take the place of a lost node
    "stop",  # ddpctl can stop its runs
    "suspend",  # a run can be suspended and resumed
    "sweep",  # ddpctl finds what a run has left behind by the run's name, even if the run's record does not list it
    "wait",  # a launch can wait for free GPUs before its nodes start
    "tethered",  # the nodes of an attached launch end when its ddpctl ends
    "uneven",  # its nodes can have different numbers of GPUs
]

StopSignal = Literal["INT", "TERM", "KILL"]


class Target(ABC):
    """The base class of all kinds of target. A verb that a target does not support raises ConfigError."""

    kind: ClassVar[str]
    capabilities: ClassVar[frozenset[Capability]]

    def __init__(self, options: Any, environ: Mapping[str, str] = os.environ) -> None:
        self.options = options
        self.environ = environ  # the variables of the user's environment

    @abstractmethod
    def render(self, plan: Plan) -> str:
        """Return a script or manifests that run the job without ddpctl."""

    def resolve(self) -> Verb[Any]:
        """Return the options, with missing values filled in from the current environment.

        Later verbs then use the same values.
        """
        yield ()
        return self.options

    @abstractmethod
    def submit(self, plan: Plan, *, attached: bool) -> Verb[Submission]:
        """Start the job. ``attached``: whether the job must end when this ddpctl ends.

        If the reply to the submission is lost, the error has the field ``submission``: the Submission of a success. If
        what was started has been removed again, the error has the field ``is_undone``.
        """

    def locate(self, run: Run) -> Verb[Lookup]:
        """Find the job of a launch by the launch's uid, if the reply to its submission was lost."""
        (state,) = yield from self.status((run,), now=math.inf)
        exists = not state.ended or state.remains or state.outcome is not None
        return Lookup(state="exists" if exists else "absent", is_final=True)

    @abstractmethod
    def status(self, runs: tuple[Run, ...], *, now: float) -> Verb[tuple[RunStatus, ...]]:
        """Return the status of each run, in the order of ``runs``. ``now`` is in seconds since the epoch."""

    @abstractmethod
    def logs(self, run: Run, query: LogQuery) -> Verb[None]:
        """Print a run's logs."""

    @abstractmethod
    def stop(self, run: Run, *, signal: StopSignal, wait: bool = True) -> Verb[bool]:
        """Stop a run. Return whether all its processes and objects are gone.

        Logs, events and outcomes that are deleted together with the nodes are first saved in the run's local folder.
        After INT or TERM, the ranks have the run's grace period to save. KILL ends them at once. INT needs the
        capability "interrupt". ``wait``: whether to wait until the run has ended.
        """

    def probe(self, run: Run, probe: Probe) -> Verb[tuple[ProbeResult, ...]]:
        """Return the metrics and files of each node, in the order of the nodes."""
        raise self._cannot(run, "show a run while it runs")

    def hosts(self) -> Verb[tuple[HostReport, ...]]:
        """Return each machine with its GPUs and the runs that use it. Needs the capability "hosts"."""
        raise NotImplementedError

    def machines(self, run: Run) -> tuple[str, ...]:
        """Return the name of each node's machine, as it is written in the options.

        Return an empty tuple if the target does not choose machines.
        """
        return ()

    def without(self, machines: Collection[str], job: JobSpec) -> Any:
        """Return the options with these machines excluded.

        Return None if too few machines remain for the job, or if the target does not choose machines.
        """
        return None

    def tasks(self, run: Run) -> tuple[Run, ...]:
        """Return each task of a job array as a run with the name RUN.task-K, the folder task-K, and K in its handle.

        Return an empty tuple if the run is not an array.
        """
        return ()

    def execute(self, run: Run, *, node: int, argv: tuple[str, ...], tty: bool) -> Verb[int]:
        """Run a command where a node runs (such as in its container). Return the command's exit code.

        If ``argv`` is empty, run a shell. ``tty``: whether the command controls the terminal.
        """
        raise self._cannot(run, "run a command where a node runs")

    def dry_run(self, plan: Plan) -> Verb[Submission]:
        """Yield the commands that ``submit`` would run.

        An error about the machines is raised after all commands have been yielded.
        """
        return (yield from self.submit(plan, attached=True))

    def expect(self, plan: Plan) -> Verb[None]:
        """Check that the project's folder contains the script that the rendered spec runs. Raises NoInputError."""
        yield ()

    def files(self, plan: Plan) -> Verb[tuple[dict[str, str], str]]:
        """Return the files of the rendered spec (name → text), and a note for the user or an empty text.

        Return no files if the spec is only the text that ``render`` returns.
        """
        yield ()
        return {}, ""

    def roots(self, run: Run) -> tuple[tuple[Host | None, str], ...]:
        """Return where the run has folders, in addition to the folder with its record.

        Each item is a machine (None: this machine) and the parent of the run's folder there. ``~`` is the home folder
        on that machine. Raises ConfigError.
        """
        return ()

    def remove_outside(self) -> str:
        """Return shell code for a machine of ``roots``. It removes files that ended runs have outside their folders."""
        return ""

    def pull(self, run: Run, into: str, *, best: bool = False) -> Verb[tuple[str, ...]]:
        """Copy the files of a run to the local folder ``into``. Return a line about each thing that is missing.

        ``best``: leave out all checkpoints except the one with the highest accuracy. Needs the capability "pull".
        """
        where = run.checkpoint_dir if run.elsewhere else run.folder
        message = f"is on a target of kind {run.kind}, so there is nothing to pull"
        raise ConfigError(f"run '{run.name}' {message}: its files are in {where}")

    def made(self, run: Run) -> Verb[tuple[str, ...]]:
        """Return a text for each machine on which the script has made files that are removed together with the run."""
        yield ()
        return ()

    def has_spares(self, run: Run) -> bool:
        """Return whether there may be a spare machine, on which ``replace_lost`` can restart a lost node."""
        return False

    def replace_lost(self, run: Run) -> Verb[Moved]:
        """Restart lost nodes on spare machines. A node is lost if its machine does not answer.

        Nodes are restarted only if the run is in rendezvous, which means that it waits for its nodes.
        """
        raise NotImplementedError

    def suspend(self, run: Run, *, again: bool) -> Verb[None]:
        """Make the nodes save and end. If ``again``, start suspended nodes instead. Needs the capability "suspend"."""
        raise self._cannot(run, "suspend a run", hint=f"stop it with ddpctl stop {run.name}")

    def exit_message(self, run: Run) -> str:
        """Return a message that says how a user can stop a run. Needed if the target lacks the capability "stop"."""
        raise NotImplementedError

    def how_to_stop_by_hand(self, run: Run) -> str:
        """Return a phrase that says how a user can stop a run that was started by hand."""
        hosts = ", ".join(sorted({*run.handle.get("hosts", ())})) or "its machine"
        return f"send SIGTERM to its ddprun on {hosts}"

    def _cannot(self, run: Run, action: str, hint: str = "") -> ConfigError:
        return ConfigError(f"run '{run.name}': a target of kind {self.kind} cannot {action}", hint=hint)


# kind → (options dataclass, target class). Their modules are imported when they are first used.
_KINDS: Mapping[str, tuple[str, str]] = {
    "local": ("ddpctl.targets.local:LocalOptions", "ddpctl.targets.local:LocalTarget"),
    "ssh": ("ddpctl.targets.ssh.options:SshOptions", "ddpctl.targets.ssh.target:SshTarget"),
    "slurm": ("ddpctl.targets.slurm.options:SlurmOptions", "ddpctl.targets.slurm.target:SlurmTarget"),
    "kubernetes": (
        "ddpctl.targets.kubernetes.options:KubernetesOptions",
        "ddpctl.targets.kubernetes.target:KubernetesTarget",
    ),
    "kaggle": ("ddpctl.targets.kaggle.options:KaggleOptions", "ddpctl.targets.kaggle.target:KaggleTarget"),
}


def default_kind(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the kind to use if neither a flag nor a file names a kind.

    Also return the reason, as a text for the user.
    """
    if job := environ.get("SLURM_JOB_ID"):
        return "slurm", f"inside Slurm's job {job}"
    return "local", "the default"


def options_type(kind: str) -> type:
    """Return the dataclass of a kind's own options."""
    return cast("type", resolve_name(_KINDS[kind][0]))


def kinds() -> Mapping[str, Callable[[], type]]:
    """Return every kind, with a function that returns the dataclass of its options."""
    return {kind: partial(options_type, kind) for kind in _KINDS}


def fill_options(cls: type, record: Mapping[str, Any]) -> Any:
    """Return options (``cls`` is ``options_type(kind)``) from a run's record. Raises ConfigError."""
    try:
        return from_record(cls, record)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"its record is invalid, because {error}") from None


def capabilities(kind: str) -> frozenset[Capability]:
    """Return the capabilities of a kind."""
    return _type(kind).capabilities


def may_leave(run: Run, state: RunStatus) -> bool:
    """Return whether a run has ended and may have left processes, or objects in a cluster."""
    return state.ended and (state.remains or (run.kind in _KINDS and "sweep" in capabilities(run.kind)))


def make(kind: str, options: Any) -> Target:
    """Return the target of a kind with these options."""
    return _type(kind)(options)


def _type(kind: str) -> type[Target]:
    return cast("type[Target]", resolve_name(_KINDS[kind][1]))
