"""The command line of another launcher, such as torchrun, as flags of ddpctl launch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpctl.errors import UsageError

# What becomes of an option: a flag of ddpctl, NAME= for a variable of the ranks, or one of these.
IMPLIED = "implied"  # ddpctl decides it for every run, so it may be left out
SWITCH = "switch"  # as IMPLIED, but the option has no value
MODULE = "-m"
CPU = "--device cpu"
WITHOUT_VALUE = frozenset({SWITCH, MODULE, CPU})

TORCHRUN: Mapping[str, str] = {
    "nnodes": "--nodes",
    "nproc-per-node": "--gpus",
    "max-restarts": "--max-restarts",
    "master-port": "--port",
    "module": MODULE,
    "m": MODULE,
    "standalone": SWITCH,
    **dict.fromkeys(
        ("master-addr", "node-rank", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "local-addr"), IMPLIED
    ),
}
ACCELERATE: Mapping[str, str] = {
    "num-machines": "--nodes",
    "num-processes": "--gpus",  # of all machines: divided below
    "main-process-port": "--port",
    "mixed-precision": "ACCELERATE_MIXED_PRECISION=",
    "gradient-accumulation-steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=",
    "num-cpu-threads-per-process": "OMP_NUM_THREADS=",
    "module": MODULE,
    "m": MODULE,
    "multi-gpu": SWITCH,
    "cpu": CPU,
    **dict.fromkeys(("main-process-ip", "machine-rank", "rdzv-backend", "rdzv-conf"), IMPLIED),
}
DEEPSPEED: Mapping[str, str] = {
    "num-nodes": "--nodes",
    "num-gpus": "--gpus",
    "master-port": "--port",
    "module": MODULE,
    **dict.fromkeys(("master-addr", "node-rank"), IMPLIED),
}
LAUNCHERS: Mapping[tuple[str, ...], Mapping[str, str]] = {
    ("torchrun",): TORCHRUN,
    ("-m", "torch.distributed.run"): TORCHRUN,
    ("-m", "torch.distributed.launch"): {**TORCHRUN, "use-env": SWITCH},
    ("accelerate", "launch"): ACCELERATE,
    ("-m", "accelerate.commands.launch"): ACCELERATE,
    ("deepspeed",): DEEPSPEED,
    ("-m", "deepspeed.launcher.runner"): DEEPSPEED,
}
WITHOUT_COUNTERPART = frozenset({"mpirun", "mpiexec", "horovodrun", "srun", "colossalai", "composer"})
ONLY_OF_TORCHRUN = frozenset(TORCHRUN) - {"m", "module"} | {"no-python", "run-path", "log-dir", "redirects", "tee"}


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A command of another launcher: its name, our flags with their values, variables, and the ranks' program."""

    launcher: str
    flags: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    implied: tuple[str, ...] = ()
    program: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return one line that says what became of each option."""
        parts = [f"{flag} {value}" for flag, value in self.flags.items()]
        parts += [f"--env {name}={value}" for name, value in self.env.items()]
        line = f"ddpctl takes the place of {self.launcher}: ddpctl launch {' '.join((*parts, '--', *self.program))}"
        return line + (f" (not needed: {', '.join(self.implied)})" if self.implied else "")


def translate(command: Sequence[str], *, refused: list[str] | None = None) -> Translation | None:
    """Return what a command of another launcher means, or None if ``command`` names none.

    A command that begins with an option of torchrun counts as one of torchrun. An option without a counterpart is
    added to ``refused``. Raises UsageError for such an option if ``refused`` is None.
    """
    arguments = command[1:] if command[:1] and command[0] in ("python", "python3") else command
    if not arguments:
        return None
    if arguments[0] in WITHOUT_COUNTERPART:
        raise UsageError(
            f"{arguments[0]}: ddpctl starts the ranks itself: leave out {arguments[0]} and give its numbers as flags"
        )
    for start, table in LAUNCHERS.items():
        if tuple(arguments[: len(start)]) == start:
            return _read(" ".join(start), arguments[len(start) :], table, refused)
    if arguments[0].startswith("--") and _key(arguments[0]) in ONLY_OF_TORCHRUN:
        return _read("torchrun", arguments, TORCHRUN, refused)
    return None


def meaning_of(option: str, table: Mapping[str, str]) -> str | None:
    """Return the entry of an option, such as ``--nproc_per_node``. Launchers take each unambiguous beginning of it."""
    key = _key(option)
    if key in table:
        return table[key]
    meanings = {table[name] for name in table if option.startswith("--") and key and name.startswith(key)}
    return meanings.pop() if len(meanings) == 1 else None


def _key(option: str) -> str:
    return option.partition("=")[0].lstrip("-").replace("_", "-")


def _read(launcher: str, arguments: Sequence[str], table: Mapping[str, str], refused: list[str] | None) -> Translation:
    flags: dict[str, str] = {}
    env: dict[str, str] = {}
    implied: list[str] = []
    module: tuple[str, ...] = ()
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        meaning = meaning_of(option, table)
        if meaning is None:
            _refuse(launcher, option, value if equals else None, rest, refused)
            continue
        if not equals and meaning not in WITHOUT_VALUE:
            if not rest:
                raise UsageError(f"{option}: this option of {launcher} needs a value")
            value = rest.pop(0)
        if meaning == MODULE:
            module = (MODULE,)
        elif meaning in (IMPLIED, SWITCH):
            implied.append(f"{option} {value}".rstrip())
        elif meaning.endswith("="):
            env[meaning.removesuffix("=")] = value
        else:
            flag, _, fixed = meaning.partition(" ")
            flags[flag] = fixed or value
    if not rest:
        raise UsageError(f"{launcher}: no script is named", hint="ddpctl launch --gpus 2 -- train.py")
    if "--gpus" in flags:
        nodes = flags.get("--nodes", "1") if table is ACCELERATE else "1"
        flags |= {"--gpus": ranks} if (ranks := _per_node(flags.pop("--gpus"), nodes, refused)) else {}
    return Translation(launcher=launcher, flags=flags, env=env, implied=tuple(implied), program=(*module, *rest))


def _refuse(launcher: str, option: str, value: str | None, rest: list[str], refused: list[str] | None) -> None:
    """Raise UsageError, or add the option to ``refused`` with its value, which may be the next of ``rest``."""
    if refused is None:
        raise UsageError(
            f"{option}: this option of {launcher} has no counterpart in ddpctl launch",
            hint="leave it out, or see docs/migrating.md for what ddpctl does instead",
        )
    if value is None and rest and not re.match(r"-|.*\.py$", rest[0]):
        value = rest.pop(0)
    refused.append(f"{option} {value or ''}".rstrip())


def _per_node(processes: str, nodes: str, refused: list[str] | None) -> str | None:
    """Return the ranks of each of these nodes: accelerate counts the processes of all machines together."""
    problem = None
    if processes in ("auto", "gpu", "cpu"):
        problem = f"{processes} ranks per node: ddpctl plans on another machine: give a number, --gpus N"
    elif nodes != "1" and (
        not (processes.isdecimal() and nodes.isdecimal() and int(nodes)) or int(processes) % int(nodes)
    ):
        problem = f"--num_processes {processes}: expected a multiple of --num_machines, which is {nodes}"
    if problem and refused is None:
        raise UsageError(problem)
    if problem and refused is not None:
        refused.append(problem)
        return None
    return processes if nodes == "1" else str(int(processes) // int(nodes))
