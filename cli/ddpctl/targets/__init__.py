"""The kinds of target: where a job's nodes may run. One file each, and one line in the registry below.

A target touches nothing: its verbs are generators of commands (``ddpctl.command``), its answers are values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from ddpctl.command import Verb
from ddpctl.errors import ConfigError
from ddpctl.fields import fields_of
from ddpctl.footprint import Footprint
from ddpctl.look import Look, Seen
from ddpctl.plan import Plan
from ddpctl.run import Run, RunStatus
from ddpctl.words import quote


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What a target has to say of a job that it started."""

    handle: Mapping[str, Any]  # kept in the run's record, for the other verbs
    note: str = ""  # one line that a person should know: what was decided for them
    table: tuple[str, ...] = ()  # what was found out about each machine, as lines
    checkpoint_dir: str | None = None  # where the checkpoints are, if not where the plan has them


@dataclass(frozen=True, kw_only=True)
class LogQuery:
    """Which lines of a run's logs are asked for."""

    follow: bool = False
    nodes: tuple[int, ...] = ()  # empty: all
    ranks: tuple[int, ...] = ()  # empty: everything that the nodes said
    tail: int | None = None  # None: from the beginning

    def places(self, run: Run) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Which node is asked for which of its ranks; none: for all that it said."""
        asked = ((node, tuple(r for r in self.ranks if r // run.job.gpus == node)) for node in range(run.job.max_nodes))
        return tuple(
            (node, ranks)
            for node, ranks in asked
            if (ranks or not self.ranks) and (not self.nodes or node in self.nodes)
        )


class Target(Protocol):
    """What every kind of target does."""

    def render(self, plan: Plan) -> str:
        """A spec that runs the job as it stands, without ddpctl."""

    def submit(self, plan: Plan, *, attached: bool) -> Verb[Submission]:
        """Start the job; ``attached``: it is to end when this ddpctl ends."""

    def status(self, runs: tuple[Run, ...], *, now: float) -> Verb[tuple[RunStatus, ...]]:
        """How runs of this target fare, in the same order. ``now``: seconds since the epoch."""

    def logs(self, run: Run, query: LogQuery) -> Verb[None]:
        """Print a run's logs."""

    def look(self, run: Run, look: Look) -> Verb[tuple[Seen, ...]]:
        """What every node's endpoint and folder say, by node."""

    def stop(self, run: Run, *, kill: bool, wait: bool = True) -> Verb[bool]:
        """Let a run save and stop within its grace, or kill it; whether nothing of it is left after the wait."""

    def execute(self, run: Run, *, node: int, argv: tuple[str, ...], tty: bool) -> Verb[int]:
        """Run a command where a node runs: its exit code. ``tty``: the terminal is its own; no arguments: a shell."""


@runtime_checkable
class Suspending(Protocol):
    """What a target does besides, if it can let a run rest."""

    def suspend(self, run: Run) -> Verb[None]:
        """End the nodes, which save first, and keep the run."""

    def resume(self, run: Run) -> Verb[None]:
        """Let a suspended run have nodes again."""


@runtime_checkable
class Leaving(Protocol):
    """What a target does besides, if its runs leave folders that are not that of their record."""

    def remove(self, run: Run, *, look: bool) -> Verb[tuple[Footprint, ...]]:
        """Take away what an ended run has left where it ran; with ``look`` only measure it. Raises DdpctlError."""


@runtime_checkable
class Rehearsing(Protocol):
    """What a target does besides, if a dry run can show more than its submit would come to."""

    def rehearse(self, plan: Plan) -> Verb[Submission]:
        """What ``submit`` would run, also where the machines are not ready, which is raised when all is shown."""


@runtime_checkable
class Expecting(Protocol):
    """What a target does besides, if the spec that it renders counts on a script in the project's folder."""

    def expect(self, plan: Plan) -> Verb[None]:
        """Look whether it is there, by the rule of a launch. Raises NoInputError."""


@runtime_checkable
class Pulling(Protocol):
    """What a target does besides, if what its runs write can only be fetched through it."""

    def pull(self, run: Run, into: str) -> Verb[None]:
        """Fetch it into a folder of this machine."""


@runtime_checkable
class Outliving(Protocol):
    """What a target does besides, if it cannot stop a run: Ctrl-C lets go of it."""

    def farewell(self, run: Run) -> str:
        """That it goes on, and where a person stops it."""


@runtime_checkable
class Filing(Protocol):
    """What a target does besides, if its spec is several files, or holds files of the project."""

    def files(self, plan: Plan) -> Verb[dict[str, str]]:
        """The spec's files: name → text."""


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
        return "slurm", f"inside of Slurm's job {job}"
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
    """A kind's options from a run's record; what this version does not know is passed over. Raises ConfigError."""
    return _fill(options_type(kind), record)


def _fill(cls: type, record: Mapping[str, Any]) -> Any:
    values = {}
    for name, field in fields_of(cls).items():
        if name in record:
            value = record[name]
            if not field.holds(value):
                raise ConfigError(f"its record has {name}: {quote(value)}, which is no {field.type_words}")
            if field.record:
                value = tuple(_fill(field.record, item) for item in value)
            values[name] = tuple(value) if field.kind == "list" else value
    return cls(**values)


def make(kind: str, options: Any) -> Target:
    """The target of that kind, with its options dataclass."""
    module, _, target = _KINDS[kind]
    made: Target = getattr(import_module(module), target)(options)
    return made
