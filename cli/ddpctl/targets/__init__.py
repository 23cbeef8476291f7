"""The kinds of target: where a job's nodes may run. One package each, and one line in the registry below.

A target performs nothing: its verbs are generators of commands (``ddpctl.command``), its answers are values.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal

from ddpctl.command import Verb
from ddpctl.errors import ConfigError, NoInputError
from ddpctl.launch_plan import Plan
from ddpctl.node_probe import Probe, ProbeResult
from ddpctl.run_status import RunStatus
from ddpctl.run_store import DiskUsage, Run
from ddpctl.spec import fields_of
from ddpctl.text import quote


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What a target has to say of a job that it started."""

    handle: Mapping[str, Any]  # kept in the run's record, for the other verbs
    note: str = ""  # one line that a user should know: what was decided for them
    table: tuple[str, ...] = ()  # what was found out about each machine, as lines
    checkpoint_dir: str | None = None  # where the checkpoints are, if not where the plan has them
    nodes: str | None = None  # how many nodes were started, if not as many as were requested


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Which lost nodes of a run were restarted on spare machines."""

    handle: Mapping[str, Any]  # the run's, changed where there are any
    nodes: tuple[int, ...] = ()
    note: str = ""  # one line that a user should know; empty: no node is lost


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """A GPU of a machine; None: the machine does not say it."""

    uuid: str
    computes: bool  # whether a program computes on it
    run: str | None = None  # the run that has it
    since: int | None = None  # seconds since the epoch, of the machine's clock
    busy_percent: int | None = None
    memory_mib: int | None = None
    total_mib: int | None = None


@dataclass(frozen=True, kw_only=True)
class CpuRun:
    """A run without GPUs."""

    run: str
    since: int


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """A machine of a target: its GPUs, who has them, and who waits."""

    host: str
    failure: str = ""  # why it does not answer
    time: int = 0  # its clock, in seconds since the epoch
    load: float | None = None  # of the last minute, in processes
    cores: int | None = None
    gpus: tuple[GpuReport, ...] = ()
    cpu_runs: tuple[CpuRun, ...] = ()
    waiting: tuple[str, ...] = ()  # the launches in line, the first one first


@dataclass(frozen=True, kw_only=True)
class LogQuery:
    """Which lines of a run's logs are asked for."""

    follow: bool = False
    nodes: tuple[int, ...] = ()  # empty: all
    ranks: tuple[int, ...] = ()  # empty: everything that the nodes said
    tail: int | None = None  # None: from the beginning

    def places(self, run: Run) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Which node is asked for which of its ranks; none: for all that it said."""
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
    """The error of a query for a node or a rank that the run has not; ``yet``: or that has said nothing so far."""
    nodes, ranks = run.job.max_nodes, run.job.world_size
    return NoInputError(
        f"{run.name} has no such log{' yet' if yet else ''}: its nodes are 0 to {nodes - 1}, its ranks 0 to {ranks - 1}"
    )


Capability = Literal[
    "discovery",  # its runs' nodes serve their metrics at addresses that they write into their files
    "hosts",  # its options list machines, which `ddpctl image ship` and `ddpctl provision` reach
    "interrupt",  # ddpctl can send its runs' ranks SIGINT, as Ctrl-C does
    "pull",  # what its runs write is fetched with `ddpctl pull`
    "queue",  # its runs wait in a queue before their nodes start
    "remains",  # a run's status tells whether processes of one that was killed are left
    "stop",  # ddpctl can stop its runs
    "suspend",  # a run can be suspended and resumed
    "sweep",  # what a run has left is found by its name, also where its record does not know of it
    "wait",  # a launch can wait for free GPUs before its nodes start
    "tethered",  # the nodes of an attached launch end with its ddpctl
]

StopSignal = Literal["INT", "TERM", "KILL"]


class Target(ABC):
    """One kind of target, with its options. A verb that a kind does not have raises ConfigError."""

    kind: ClassVar[str]
    capabilities: ClassVar[frozenset[Capability]]

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def render(self, plan: Plan) -> str:
        """Return a spec that runs the job as it stands, without ddpctl."""

    def resolve(self) -> Verb[Any]:
        """Return the options with what they leave to the present environment written out, for later verbs."""
        yield ()
        return self.options

    @abstractmethod
    def submit(self, plan: Plan, *, attached: bool) -> Verb[Submission]:
        """Start the job; ``attached``: it is to end when this ddpctl ends."""

    @abstractmethod
    def status(self, runs: tuple[Run, ...], *, now: float) -> Verb[tuple[RunStatus, ...]]:
        """Return the status of runs of this target, in the same order. ``now``: seconds since the epoch."""

    @abstractmethod
    def logs(self, run: Run, query: LogQuery) -> Verb[None]:
        """Print a run's logs."""

    @abstractmethod
    def stop(self, run: Run, *, signal: StopSignal, wait: bool = True) -> Verb[bool]:
        """Let a run save and stop within its grace, or kill it; return whether nothing of it is left after the wait.

        INT is asked only of a target with the capability "interrupt".
        """

    def probe(self, run: Run, probe: Probe) -> Verb[tuple[ProbeResult, ...]]:
        """Return what every node's endpoint and folder say, by node."""
        raise self._cannot(run, "show a run while it runs")

    def hosts(self) -> Verb[tuple[HostReport, ...]]:
        """Return what each machine has, and who has it. Of the capability "hosts"."""
        raise NotImplementedError

    def without(self, run: Run, nodes: Collection[int]) -> tuple[Any, tuple[str, ...]]:
        """Return options without the machines of these nodes of a run, and the machines; None: too few are left.

        A target that does not choose machines by itself leaves none out.
        """
        return None, ()

    def tasks(self, run: Run) -> tuple[Run, ...]:
        """Return the trainings of an array as runs of their own, named RUN.task-K; none: it is no array."""
        return ()

    def execute(self, run: Run, *, node: int, argv: tuple[str, ...], tty: bool) -> Verb[int]:
        """Run a command where a node runs; return its exit code. ``tty``: with the terminal. No ``argv``: a shell."""
        raise self._cannot(run, "run a command where a node runs")

    def dry_run(self, plan: Plan) -> Verb[Submission]:
        """Yield what ``submit`` would run. Where the machines are not ready, that is raised when all is shown."""
        return (yield from self.submit(plan, attached=True))

    def expect(self, plan: Plan) -> Verb[None]:
        """See that what the rendered spec refers to is in the project's folder. Raises NoInputError."""
        yield ()

    def files(self, plan: Plan) -> Verb[tuple[dict[str, str], str]]:
        """Return the spec's files, name → text, where it is several, and a line that a user should know.

        No files: ``render`` is all.
        """
        yield ()
        return {}, ""

    def remove(self, run: Run, *, dry_run: bool) -> Verb[tuple[DiskUsage, ...]]:
        """Remove what an ended run has left outside its record's folder; with ``dry_run`` only measure it."""
        yield ()
        return ()

    def keep(self, run: Run) -> Verb[None]:
        """Keep here what its timeline and its report need, where that will go with its nodes. Raises no DdpctlError."""
        yield ()

    def pull(self, run: Run, into: str, *, best: bool = False) -> Verb[tuple[str, ...]]:
        """Fetch what a run has written into a folder of this machine; lines of what could not be had.

        ``best``: of its checkpoints only the one of the highest accuracy. Of the capability "pull".
        """
        where = run.checkpoint_dir if run.elsewhere else run.folder
        raise ConfigError(f"{run.name}: there is nothing to pull from a target of kind {run.kind}: it is in {where}")

    def has_spares(self, run: Run) -> bool:
        """Whether ``replace_lost`` may find a machine for a lost node."""
        return False

    def replace_lost(self, run: Run, plan: Plan) -> Verb[Moved]:
        """Start nodes on spare machines for which the run waits, and whose machines do not answer."""
        raise NotImplementedError

    def suspend(self, run: Run) -> Verb[None]:
        """End the nodes, which save first, and keep the run. Of the capability "suspend"."""
        raise self._cannot(run, "suspend a run", hint=f"ddpctl stop {run.name}")

    def resume(self, run: Run) -> Verb[None]:
        """Start the nodes of a suspended run again. Of the capability "suspend"."""
        raise self._cannot(run, "suspend a run", hint=f"ddpctl stop {run.name}")

    def exit_message(self, run: Run) -> str:
        """Return how a user stops a run, where ddpctl cannot: without the capability "stop"."""
        raise NotImplementedError

    def _cannot(self, run: Run, what: str, hint: str = "") -> ConfigError:
        return ConfigError(f"{run.name}: a target of kind {self.kind} cannot {what}", hint=hint)


# kind → (module, options dataclass, target class): imported when it is used.
_KINDS: Mapping[str, tuple[str, str, str]] = {
    "local": ("ddpctl.targets.local", "LocalOptions", "LocalTarget"),
    "ssh": ("ddpctl.targets.ssh", "SshOptions", "SshTarget"),
    "slurm": ("ddpctl.targets.slurm", "SlurmOptions", "SlurmTarget"),
    "kubernetes": ("ddpctl.targets.kubernetes", "KubernetesOptions", "KubernetesTarget"),
    "kaggle": ("ddpctl.targets.kaggle", "KaggleOptions", "KaggleTarget"),
}


def default_kind(environ: Mapping[str, str]) -> tuple[str, str]:
    """The kind that is meant where neither flag nor file names one, and why."""
    if job := environ.get("SLURM_JOB_ID"):
        return "slurm", f"inside Slurm's job {job}"
    return "local", "the default"


def options_type(kind: str) -> type:
    """The dataclass of a kind's own options."""
    module, options, _ = _KINDS[kind]
    found: type = getattr(import_module(module), options)
    return found


def kinds() -> Mapping[str, Callable[[], type]]:
    """Every kind, and how to get the dataclass of its options."""
    return {kind: lambda kind=kind: options_type(kind) for kind in _KINDS}  # type: ignore[misc]


def fill_options(kind: str, record: Mapping[str, Any]) -> Any:
    """A kind's options from a run's record; what this version does not know is skipped. Raises ConfigError."""
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
    """What a kind can do besides the verbs that every kind has."""
    return _type(kind).capabilities


def may_leave(run: Run, state: RunStatus) -> bool:
    """Whether something of a run that has ended may be left where it ran: objects, a job, its pods."""
    return state.ended and (state.remains or (run.kind in _KINDS and "sweep" in capabilities(run.kind)))


def make(kind: str, options: Any) -> Target:
    """The target of that kind, with its options dataclass."""
    return _type(kind)(options)


def _type(kind: str) -> type[Target]:
    module, _, target = _KINDS[kind]
    found: type[Target] = getattr(import_module(module), target)
    return found
