"""The kinds of target, on which a job's nodes may run. Each kind has a package and a line in the registry below.

A target runs nothing itself: its operations ("verbs") are generators that yield commands (``ddpctl.command``) and
return values.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal

from ddpctl.command import Host, Verb
from ddpctl.errors import ConfigError, NoInputError
from ddpctl.launch_plan import Plan
from ddpctl.node_probe import Probe, ProbeResult
from ddpctl.run_status import RunStatus
from ddpctl.run_store import Run
from ddpctl.spec import JobSpec, fields_of
from ddpctl.text import quote
from ddpwire.run_files import NODE_LOG, rank_log, timed_log


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What a target reports about a job that it started."""

    handle: Mapping[str, Any]  # kept in the run's record, for the other verbs
    note: str = ""  # one line for the user: what was decided for them
    table: tuple[str, ...] = ()  # lines that show what was found out about each machine
    checkpoint_dir: str | None = None  # where the checkpoints are, if the plan has another place
    nodes: str | None = None  # how many nodes were started, if not the requested number


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The lost nodes of a run that were restarted on spare machines."""

    handle: Mapping[str, Any]  # the run's handle, updated if any nodes were restarted
    nodes: tuple[int, ...] = ()
    note: str = ""  # one line for the user; empty if no node is lost


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """A GPU of a machine. A field is None if the machine does not report it."""

    uuid: str
    computes: bool  # whether a program computes on it
    run: str | None = None  # the run that uses it
    since: int | None = None  # by the machine's clock, in seconds since the epoch
    busy_percent: int | None = None
    memory_mib: int | None = None
    total_mib: int | None = None


@dataclass(frozen=True, kw_only=True)
class CpuRun:
    """A run that uses no GPUs."""

    run: str
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
    """Which lines of a run's logs are requested."""

    follow: bool = False
    nodes: tuple[int, ...] = ()  # empty for all nodes
    ranks: tuple[int, ...] = ()  # empty for the complete output of the nodes
    tail: int | None = None  # how many of the last lines; None for all lines
    timestamps: bool = False  # each line begins with its time

    def files(self, run: Run, node: int, ranks: tuple[int, ...]) -> dict[str, str]:
        """Return the files of a node, each with the prefix of its lines. Without ``ranks``, return all output."""
        if not self.timestamps:
            return {rank_log(rank): f"[node{node} rank{rank}] " for rank in ranks} or {NODE_LOG: ""}
        first, num = node * run.job.local_world_size, run.job.local_world_size
        every: tuple[int | None, ...] = (None, *range(first, first + num))
        names = [timed_log(rank) for rank in ranks or every]
        if self.tail is None and not self.follow:
            names += [name.replace(".log", ".1.log") for name in names]  # their earlier lines
        return dict.fromkeys(names, "")

    def places(self, run: Run) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return each node to query, with its requested ranks; no ranks mean the complete output of the node."""
        asked = (
            (node, tuple(r for r in self.ranks if r // run.job.local_world_size == node))
            for node in range(run.job.max_nodes)
        )
        return tuple(
            (node, ranks)
            for node, ranks in asked
            if (ranks or not self.ranks) and (not self.nodes or node in self.nodes)
        )


def no_such_log(run: Run, *, yet: bool = False) -> NoInputError:
    """Return the error for a query about a node or rank that the run lacks or, if ``yet``, that has no output yet."""
    nodes, ranks = run.job.max_nodes, run.job.world_size
    return NoInputError(
        f"run '{run.name}' has no such log{' yet' if yet else ''}: nodes are 0 to {nodes - 1}, ranks 0 to {ranks - 1}"
    )


Capability = Literal[
    "copies",  # nodes can have copies of the checkpoints, because each has a disk of its own
    "discovery",  # the nodes of its runs serve metrics, at addresses that they write into their files
    "hosts",  # its options list machines, which `ddpctl image ship` and `ddpctl provision` can reach
    "interrupt",  # ddpctl can send SIGINT to the ranks of its runs, as Ctrl-C does
    "pull",  # `ddpctl pull` fetches what its runs write
    "queue",  # its runs wait in a queue before their nodes start
    "stop",  # ddpctl can stop its runs
    "suspend",  # a run can be suspended and resumed
    "sweep",  # what a run has left behind is found by the run's name, even if its record does not mention it
    "wait",  # a launch can wait for free GPUs before its nodes start
    "tethered",  # the nodes of an attached launch end when its ddpctl ends
]

StopSignal = Literal["INT", "TERM", "KILL"]


class Target(ABC):
    """A kind of target, with its options. A verb that a kind does not support raises ConfigError."""

    kind: ClassVar[str]
    capabilities: ClassVar[frozenset[Capability]]

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def render(self, plan: Plan) -> str:
        """Return a spec (a script or manifests) that runs the job as it is, without ddpctl."""

    def resolve(self) -> Verb[Any]:
        """Return the options completed with values from the current environment, so that later verbs use the same."""
        yield ()
        return self.options

    @abstractmethod
    def submit(self, plan: Plan, *, attached: bool) -> Verb[Submission]:
        """Start the job. ``attached``: whether it must end when this ddpctl ends."""

    @abstractmethod
    def status(self, runs: tuple[Run, ...], *, now: float) -> Verb[tuple[RunStatus, ...]]:
        """Return the status of runs of this target, in the same order. ``now`` is in seconds since the epoch."""

    @abstractmethod
    def logs(self, run: Run, query: LogQuery) -> Verb[None]:
        """Print a run's logs."""

    @abstractmethod
    def stop(self, run: Run, *, signal: StopSignal, wait: bool = True) -> Verb[bool]:
        """Make a run save and stop within its grace period, or kill it; return whether nothing of it is left.

        INT is sent only to a target with the capability "interrupt".
        """

    def probe(self, run: Run, probe: Probe) -> Verb[tuple[ProbeResult, ...]]:
        """Return what each node's metrics endpoint and folder contain, in the order of the nodes."""
        raise self._cannot(run, "show a run while it runs")

    def hosts(self) -> Verb[tuple[HostReport, ...]]:
        """Return what each machine has and which runs use it. Needs the capability "hosts"."""
        raise NotImplementedError

    def machines(self, run: Run) -> tuple[str, ...]:
        """Return the machine of each node, as named in the options; empty if the target does not choose machines."""
        return ()

    def without(self, machines: Collection[str], job: JobSpec) -> Any:
        """Return options that exclude these machines; None if too few remain or the target does not choose machines."""
        return None

    def tasks(self, run: Run) -> tuple[Run, ...]:
        """Return the tasks of an array as separate runs with names RUN.task-K, or none if the run is not an array."""
        return ()

    def execute(self, run: Run, *, node: int, argv: tuple[str, ...], tty: bool) -> Verb[int]:
        """Run a command, or a shell if ``argv`` is empty, in the place where a node runs; return its exit code.

        ``tty``: whether the command controls the terminal.
        """
        raise self._cannot(run, "run a command where a node runs")

    def dry_run(self, plan: Plan) -> Verb[Submission]:
        """Yield what ``submit`` would run. If machines are not ready, raise that error after showing all commands."""
        return (yield from self.submit(plan, attached=True))

    def expect(self, plan: Plan) -> Verb[None]:
        """Check that the project's folder contains what the rendered spec refers to. Raises NoInputError."""
        yield ()

    def files(self, plan: Plan) -> Verb[tuple[dict[str, str], str]]:
        """Return the files of a spec that consists of several (name → text), and a line for the user.

        If no files are returned, the result of ``render`` is the complete spec.
        """
        yield ()
        return {}, ""

    def roots(self, run: Run) -> tuple[tuple[Host | None, str], ...]:
        """Return where a run has a folder with its name besides that of its record. Raises ConfigError.

        Each place is a machine (None: this one) and the folder of its runs, in which ``~`` is the home folder there.
        """
        return ()

    def keep(self, run: Run) -> Verb[None]:
        """Fetch the files for timeline and report if they would be deleted with the nodes. Raises no DdpctlError."""
        yield ()

    def pull(self, run: Run, into: str, *, best: bool = False) -> Verb[tuple[str, ...]]:
        """Fetch what a run has written into a local folder; return lines about what could not be fetched.

        ``best``: fetch only the checkpoint with the highest accuracy. Needs the capability "pull".
        """
        where = run.checkpoint_dir if run.elsewhere else run.folder
        raise ConfigError(f"run '{run.name}' needs no pull from a target of kind {run.kind}: its files are in {where}")

    def has_spares(self, run: Run) -> bool:
        """Return whether ``replace_lost`` may find a machine for a lost node."""
        return False

    def replace_lost(self, run: Run, plan: Plan) -> Verb[Moved]:
        """Restart nodes on spare machines if the run waits for them and their own machines do not answer."""
        raise NotImplementedError

    def suspend(self, run: Run) -> Verb[None]:
        """Make the nodes save and end, but keep the run. Needs the capability "suspend"."""
        raise self._cannot(run, "suspend a run", hint=f"stop it with ddpctl stop {run.name}")

    def resume(self, run: Run) -> Verb[None]:
        """Start the nodes of a suspended run again. Needs the capability "suspend"."""
        raise self._cannot(run, "suspend a run", hint=f"stop it with ddpctl stop {run.name}")

    def exit_message(self, run: Run) -> str:
        """Return how a user can stop a run that ddpctl cannot stop, because the target lacks the capability "stop"."""
        raise NotImplementedError

    def _cannot(self, run: Run, what: str, hint: str = "") -> ConfigError:
        return ConfigError(f"run '{run.name}': a target of kind {self.kind} cannot {what}", hint=hint)


# kind → (module, options dataclass, target class). A module is imported when it is first used.
_KINDS: Mapping[str, tuple[str, str, str]] = {
    "local": ("ddpctl.targets.local", "LocalOptions", "LocalTarget"),
    "ssh": ("ddpctl.targets.ssh", "SshOptions", "SshTarget"),
    "slurm": ("ddpctl.targets.slurm", "SlurmOptions", "SlurmTarget"),
    "kubernetes": ("ddpctl.targets.kubernetes", "KubernetesOptions", "KubernetesTarget"),
    "kaggle": ("ddpctl.targets.kaggle", "KaggleOptions", "KaggleTarget"),
}


def default_kind(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the kind to use if neither a flag nor a file names one, and the reason."""
    if job := environ.get("SLURM_JOB_ID"):
        return "slurm", f"inside Slurm's job {job}"
    return "local", "the default"


def options_type(kind: str) -> type:
    """Return the dataclass of a kind's own options."""
    module, options, _ = _KINDS[kind]
    found: type = getattr(import_module(module), options)
    return found


def kinds() -> Mapping[str, Callable[[], type]]:
    """Return every kind, with a function that returns the dataclass of its options."""
    return {kind: lambda kind=kind: options_type(kind) for kind in _KINDS}  # type: ignore[misc]


def fill_options(kind: str, record: Mapping[str, Any]) -> Any:
    """Return a kind's options from a run's record; skip keys that this version does not know. Raises ConfigError."""
    return _fill(options_type(kind), record)


def _fill(cls: type, record: Mapping[str, Any]) -> Any:
    values = {}
    for name, field in fields_of(cls).items():
        if name in record:
            value = record[name]
            if not field.holds(value):
                raise ConfigError(f"in its record, {name} is {quote(value)}, not {field.type_words}")
            if field.record:
                value = tuple(_fill(field.record, item) for item in value)
            values[name] = tuple(value) if field.kind == "list" else value
    return cls(**values)


def capabilities(kind: str) -> frozenset[Capability]:
    """Return what a kind can do in addition to the verbs that every kind has."""
    return _type(kind).capabilities


def may_leave(run: Run, state: RunStatus) -> bool:
    """Return whether an ended run may have left something where it ran: processes, objects, a job or pods."""
    return state.ended and (state.remains or (run.kind in _KINDS and "sweep" in capabilities(run.kind)))


def make(kind: str, options: Any) -> Target:
    """Return the target of a kind with these options."""
    return _type(kind)(options)


def _type(kind: str) -> type[Target]:
    module, _, target = _KINDS[kind]
    found: type[Target] = getattr(import_module(module), target)
    return found
