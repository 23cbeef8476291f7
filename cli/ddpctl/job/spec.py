"""Defines a job, whose settings have the same meaning on every target."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ddpctl.errors import UsageError
from ddpctl.job.other_launchers import translate
from ddpctl.job.values import Options, Rule, Table, Words, between, matching
from ddpctl.text import counted, either, quote
from ddpwire import names
from ddpwire.machine import MAX_PORT
from ddpwire.run_files import NOTICE_EVENTS
from ddpwire.version import __version__

# The image that a release publishes. A spec's default image is defined only here.
DEFAULT_IMAGE = f"ghcr.io/ddpctl/ddpctl:{__version__}"
DEFAULT_SHM = "8Gi"  # an engine's own default, 64 MB, is soon full


Device = Literal["auto", "cuda", "cpu"]
NAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
NAME = matching(
    NAME_PATTERN.pattern, "lower-case letters, digits and '-', starting with a letter, at most 40 characters"
)

# Users must not set these variables. ddpctl and ddprun set them for each node and rank.
OURS = frozenset({
    names.MASTER_ADDR, names.MASTER_PORT, names.RANK, names.WORLD_SIZE, names.LOCAL_RANK, names.LOCAL_WORLD_SIZE,
    names.GROUP_RANK, names.GROUP_WORLD_SIZE, names.RANKS_NODE, names.RUN_ID, names.RUN_UID, names.USER,
    names.RUN_DIR, names.CHECKPOINT_DIR, names.DEVICE, names.JOB_ENV, names.ATTEMPT, names.NODES_HERE,
    names.CHECKPOINT_STORE, names.LIFELINE_FD, names.PROMETHEUS_MULTIPROC_DIR,
})  # fmt: skip
OF_SHELLS = ("BASHOPTS", "BASHPID", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID")  # no script can set these
VARIABLE_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_nodes(nodes: str) -> str:
    """Check that the text is ``N`` or ``MIN:MAX`` with 1 ≤ MIN ≤ MAX ≤ 9999. Raises ValueError."""
    names.node_range(nodes)
    return nodes


def check_env(env: Mapping[str, str]) -> Mapping[str, str]:
    """Check the names and the values of environment variables. Raises ValueError.

    A shell must accept each name. The names of variables that ddpctl and ddprun set are not allowed.
    """
    for name, value in env.items():
        if not VARIABLE_PATTERN.fullmatch(name):
            raise ValueError(f"'{name}' is not a variable name: use letters, digits and '_', not starting with a digit")
        _check_not_ours(name)
        if "\0" in value:
            raise ValueError(f"a NUL byte is not allowed in the value of {name}")
    return env


def _check_not_ours(name: str) -> None:
    if name in OURS or name.startswith("PET_"):
        raise ValueError(f"{name} cannot be set: ddpctl and ddprun set it for each node and rank")


IMAGE = r"(?=.{1,512}$)[a-z0-9][A-Za-z0-9_.:/-]*(@sha256:[0-9a-f]{64})?"  # the registry checks the finer rules
SIZE_PATTERN = re.compile(r"([1-9][0-9]*)([MGT]i?)")
_CLOCK = r"(?=.*[1-9])(?:[0-9]{1,6}-[0-9]{1,2}(?::[0-9]{2}){0,2}|[0-9]{1,6}:[0-9]{2}:[0-9]{2})"  # of sbatch --time
TIME_PATTERN = re.compile(
    rf"(?=[1-9])(?:[0-9]{{1,9}}d)?(?:[0-9]{{1,9}}h)?(?:[0-9]{{1,9}}m)?(?:[0-9]{{1,9}}s)?|{_CLOCK}"
)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
STORE = matching(
    r"[a-z][a-z0-9]{0,15}://[A-Za-z0-9][A-Za-z0-9._/=+-]{0,511}",  # no user, password or query
    "expected the URL of an object store, such as s3://BUCKET/PATH",
)


SIZE = matching(
    SIZE_PATTERN.pattern,
    "expected a whole number and Mi, Gi or Ti, such as 64Gi, or M, G or T as the scheduler has them",
)
check_size = SIZE.check


def check_time(text: str, *, example: str = "12h") -> str:
    """Check that the text is a duration such as ``12h`` or ``2h30m``. Raises ValueError."""
    if not TIME_PATTERN.fullmatch(text):
        raise ValueError(
            f"expected whole numbers with d, h, m or s, such as {example} or 2h30m, or D-HH:MM:SS or HH:MM:SS"
        )
    return text


def time_s(text: str) -> int:
    """Return a duration such as ``2h30m`` or ``30-00:00:00`` in seconds."""
    if text[-1] not in _SECONDS:
        days, _, clock = text.rpartition("-")
        hours, minutes, seconds = (*map(int, clock.split(":")), 0, 0)[:3]
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return sum(int(number) * _SECONDS[unit] for number, unit in re.findall(r"([0-9]+)([smhd])", text))


def size_bytes(size: str) -> int:
    """Return a size such as ``64Gi`` in bytes. ``64G`` is the same, as in Slurm and docker."""
    number, unit = SIZE_PATTERN.fullmatch(size).groups()  # type: ignore[union-attr]
    return int(number) << {"M": 20, "G": 30, "T": 40}[unit[0]]


MOUNTS = matching(
    r"[^:,\0\n]+:/[^:,\0\n]*(:ro)?",
    "{!r} is not SOURCE:PATH or SOURCE:PATH:ro with an absolute PATH, and without a comma, a line break and a NUL byte",
)


def check_secrets(secrets: tuple[str, ...]) -> tuple[str, ...]:
    """Check that each secret is the name of a variable that the user can set. Raises ValueError."""
    for name in secrets:
        if not VARIABLE_PATTERN.fullmatch(name):
            raise ValueError("expected the NAME of an environment variable, not the value of a secret")
        if name in OF_SHELLS:
            raise ValueError(f"{name} is a variable that shells set themselves: give the secret another name")
        _check_not_ours(name)
    return secrets


def check_events(events: tuple[str, ...]) -> tuple[str, ...]:
    """Check that there are events, and notices of each of them. Raises ValueError."""
    if not events:
        raise ValueError("names no event: leave it out, or leave out notify")
    for event in events:
        if event not in NOTICE_EVENTS:
            raise ValueError(f"{quote(event)} is not {either(NOTICE_EVENTS)}")
    return events


COMMANDS = matching(r"[^\0]*\S[^\0]*", "a command must not be empty or contain a NUL byte")
# The runtime would take a word without -- for the name of the image.
RUNTIME_ARGS = matching(r"--[a-z][^\0\n]*", "an option of the runtime is --NAME or --NAME=VALUE, on one line")


def check_gpus(gpus: int | tuple[int, ...]) -> int | tuple[int, ...]:
    """Check that each number is from 1 to 64. Raises ValueError."""
    numbers = gpus if isinstance(gpus, tuple) else (gpus,)
    if not numbers:
        raise ValueError("the list is empty: expected a number for each node, such as [4, 2]")
    if not all(1 <= number <= 64 for number in numbers):
        raise ValueError("expected 1 to 64")
    return gpus


_NUMBER_OF_GPUS = {"type": "integer", "minimum": 1, "maximum": 64}
GPUS = Rule(check_gpus, {"anyOf": [_NUMBER_OF_GPUS, {"type": "array", "items": _NUMBER_OF_GPUS, "minItems": 1}]})


def check_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """Check that no argument contains NUL, and that a script or module is named, no launcher. Raises ValueError."""
    if any("\0" in word for word in command):
        raise ValueError("a NUL byte is not allowed")
    program = command[1:] if command[:1] in (("python",), ("python3",)) else command
    if program[:1] == ("",) or program[:2] == ("-m", ""):
        raise ValueError("the script's name is empty")
    if program == ("-m",):
        raise ValueError("-m needs the name of a module")
    try:
        translation = translate(command)
    except UsageError as error:
        raise ValueError(str(error)) from None
    if translation:
        raise ValueError(str(translation))
    return command


@dataclass(frozen=True, kw_only=True)
class JobSpec(Options):
    """The settings of a training, which do not depend on the target."""

    name: Annotated[str, NAME] = "train"
    """The job's name: lower-case letters, digits and '-'. A run's default name is this name and a random word."""
    nodes: Annotated[str, Rule(check_nodes, {"pattern": names.NODES_PATTERN})] = "1"
    """Number of nodes: N, or MIN:MAX to start with fewer nodes if not all join in time."""
    spares: Annotated[int, between(0, 4999)] = 0
    """Additional machines that wait to take the place of a lost node, fewer than nodes; on SSH hosts and Slurm."""
    gpus: Annotated[int | tuple[int, ...], GPUS] = 1
    """GPUs per node, with one rank each; on the targets ssh and local also a list with the number of each node, such as
    [4, 4, 2]. On machines without GPUs: ranks per node."""
    ranks: Annotated[int, between(1, 64)] | None = None
    """Ranks per node, a divisor of gpus; each sees all GPUs of its node. null: one rank per GPU."""
    device: Device = "auto"
    """auto: GPUs if there are any, else CPUs; cuda: GPUs, or an error; cpu: no GPU is used."""
    command: Annotated[Words, Rule(check_command)] = ()
    """A script and its arguments, as for torchrun. Empty: ddptrain, the trainer that comes with ddpctl."""
    env: Annotated[Table, Rule(check_env)] = field(default_factory=dict)
    """Environment variables of every rank; values are strings."""
    port: Annotated[int, between(1, MAX_PORT)] | None = None
    """The rendezvous port on node 0; null: the target chooses one."""
    grace: Annotated[float, between(0, 3600)] = 30.0
    """Seconds that ranks have to save after a stop request, before they are killed."""
    stop_signal: Literal["TERM", "USR1", "USR2"] = "TERM"
    """The signal that asks the ranks to save and end: before a time limit, at a preemption and for ddpctl stop."""
    node_setup: Annotated[Words, COMMANDS] = ()
    """Shell commands that run on each node before its ranks start, once for each start of ddprun. If one fails, so does
    the run."""
    node_teardown: Annotated[Words, COMMANDS] = ()
    """Shell commands that run on each node after its ranks have ended, whether they failed or not."""
    setup_timeout: Annotated[float, between(1)] = 1800.0
    """Seconds that all commands of node_setup may take together."""
    teardown_timeout: Annotated[float, between(1, 3600)] = 60.0
    """Seconds that all commands of node_teardown may take together."""
    notify: Annotated[Words, COMMANDS] = ()
    """Who is told what becomes of the run: $NAME, where the secret NAME is an address for the library apprise (mail,
    Slack, ntfy, a webhook), or a shell command, which finds the notice in DDP_NOTICE_TEXT."""
    notify_on: Annotated[Words, Rule(check_events, {"items": {"enum": [*NOTICE_EVENTS]}})] = NOTICE_EVENTS
    """The events that are told: succeeded, failed, restarted, hang, preempted, lost_node."""
    join_timeout: Annotated[float, between(1)] | None = None
    """Seconds to wait for all nodes. null: the target's default (30 on one machine)."""
    hang_timeout: Annotated[float, between(0)] | None = None
    """Seconds without a heartbeat of any rank after which a rank is considered hung; 0: never; null: 300."""
    max_restarts: Annotated[int, between(0, 1000)] | None = None
    """Largest number of restarts of all ranks after a rank was killed or a node was lost; 0: none; null: until three
    attempts in a row make no progress."""
    checkpoint_copies: Annotated[int, between(1, 64)] = 1
    """On SSH hosts without a shared checkpoint_dir: how many nodes have each checkpoint; 1: only node 0."""

    image: Annotated[str, matching(IMAGE, "expected REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:DIGEST")] = DEFAULT_IMAGE
    """The container image of every node. The target local and the runtime 'none' use no container."""
    cpus: Annotated[int, between(1, 1024)] | None = None
    """CPU cores per node. null: the target's default."""
    memory: Annotated[str, SIZE] | None = None
    """Memory per node, such as 64Gi, or 64G as the target's scheduler counts it. null: the target's default."""
    shm: Annotated[str, SIZE] | None = None
    """Size of a container's /dev/shm, which DataLoader workers use; it counts as part of memory. null: 8Gi, but at most
    a quarter of memory."""
    mounts: Annotated[Words, MOUNTS] = ()
    """Folders mounted in the container: SOURCE:PATH, or SOURCE:PATH:ro for read-only. SOURCE is a path on the node; on
    Kubernetes also pvc=CLAIM."""
    secrets: Annotated[Words, Rule(check_secrets)] = ()
    """Names of variables of your environment that are passed to the ranks; their values appear in no spec, record or
    log."""
    checkpoint_dir: Annotated[str, STORE] | None = None
    """An object store, such as s3://BUCKET/PATH, that gets a copy of each checkpoint, in a folder named after the run;
    null: none. It needs ddpctl[s3] where the nodes run."""
    time_limit: Annotated[str, Rule(check_time, {"pattern": TIME_PATTERN.pattern})] | None = None
    """Time limit of the run, such as 12h, or 2-12:00:00 as in sbatch; the ranks save and stop before it. null: no
    limit."""

    @property
    def max_gpus(self) -> int:
        """The number of GPUs of a node, or the largest one if they differ."""
        return max(self.gpus) if isinstance(self.gpus, tuple) else self.gpus

    def gpus_of(self, node: int) -> int:
        """Return the number of GPUs of a node. A spare has the largest number, so that it can replace any node."""
        return self.gpus[node] if isinstance(self.gpus, tuple) and node < self.max_nodes else self.max_gpus

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of all nodes."""
        return sum(self.gpus) if isinstance(self.gpus, tuple) else self.max_nodes * self.gpus

    @property
    def is_uneven(self) -> bool:
        """Whether the nodes have their own numbers of GPUs."""
        return isinstance(self.gpus, tuple)

    @property
    def local_world_size(self) -> int:
        """The number of ranks per node, or the largest one if they differ."""
        return self.ranks or self.max_gpus

    def ranks_on(self, node: int) -> range:
        """Return the ranks of a node while all nodes run. A spare may have the ranks of any node."""
        if node >= self.max_nodes:
            return range(self.world_size)
        before = self.gpus[:node] if isinstance(self.gpus, tuple) and not self.ranks else ()
        first = sum(before) or node * self.local_world_size
        return range(first, first + (self.ranks or self.gpus_of(node)))

    @property
    def size(self) -> str:
        """The numbers of nodes and ranks, such as ``2 x 4`` or ``4+4+2``."""
        if not self.is_uneven:
            return f"{self.nodes} x {self.local_world_size}"
        return "+".join(str(len(self.ranks_on(node))) for node in range(self.max_nodes))

    @property
    def max_machines(self) -> int:
        """The number of nodes that are started, and of spares."""
        return self.max_nodes + self.spares

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes, if all nodes join."""
        return self.max_nodes * self.ranks if self.ranks else self.num_gpus

    def problems(self) -> Iterable[tuple[str, str]]:
        """Yield the key and an error message for each invalid combination of settings."""
        if isinstance(self.gpus, tuple) and len(self.gpus) != self.max_nodes:
            given, nodes = counted(len(self.gpus), "number"), counted(self.nodes, "node")
            yield "job.gpus", f"{given} for {nodes}: give one for each node, or use --nodes {len(self.gpus)}"
            return
        uneven = {gpus for gpus in map(self.gpus_of, range(self.max_nodes)) if self.ranks and gpus % self.ranks}
        if uneven:
            todo = "set ranks to a divisor of gpus, or leave it out for one rank per GPU"
            if self.device == "cpu":
                todo = (
                    f"to run {self.ranks} CPU ranks, leave ranks out and set gpus to {self.ranks} (without GPUs, "
                    "gpus is the number of ranks)"
                )
            yield (
                "job.ranks",
                f"gpus ({min(uneven)}) is not divisible by {self.ranks}, the number of ranks per node: {todo}",
            )
        if self.spares and (self.min_nodes < self.max_nodes or self.spares >= self.max_nodes):
            is_fixed = self.min_nodes == self.max_nodes
            todo = "use fewer spares than nodes" if is_fixed else "use a fixed number of nodes"
            yield "job.spares", f"{self.spares} for {self.nodes} nodes: {todo}"
        for target in self.notify:
            if re.fullmatch(names.ADDRESS_PATTERN, target):
                yield (
                    "job.notify",
                    "an address may be secret: put it in a variable, name it in secrets, and write $NAME",
                )
            variable = re.fullmatch(names.NOTICE_VARIABLE, target)
            if variable and variable[1] not in {*self.secrets, *self.env}:
                yield "job.notify", f"no node has a variable {quote(variable[1])}: name it in secrets"
        if self.checkpoint_copies > self.max_nodes:
            yield (
                "job.checkpoint_copies",
                f"{self.checkpoint_copies} is more than the number of nodes ({self.max_nodes})",
            )

    @property
    def stop_s(self) -> float:
        """How long a node may take to end after a stop request: to save, and for node_teardown."""
        return self.grace + (self.teardown_timeout if self.node_teardown else 0.0)

    @property
    def time_limit_s(self) -> int | None:
        """The time limit in seconds, or None."""
        return None if self.time_limit is None else time_s(self.time_limit)

    @property
    def shm_size(self) -> str:
        """The size of a container's /dev/shm: ``shm``, or a default that depends on ``memory``."""
        if self.shm is not None:
            return self.shm
        if self.memory is None or (quarter := size_bytes(self.memory) // 4) >= size_bytes(DEFAULT_SHM):
            return DEFAULT_SHM
        return f"{quarter >> 30}Gi" if quarter % (1 << 30) == 0 else f"{max(1, quarter >> 20)}Mi"

    @property
    def min_nodes(self) -> int:
        """The minimum number of nodes that the run needs."""
        return names.node_range(self.nodes)[0]

    @property
    def max_nodes(self) -> int:
        """The number of nodes that are started. No more nodes can join."""
        return names.node_range(self.nodes)[1]
