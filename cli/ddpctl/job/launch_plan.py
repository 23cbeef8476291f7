"""Determines the environment and the arguments of ddprun on each node of a run, for all targets."""

import itertools
import os
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from ddpctl.command import Command, Host, Output, Verb
from ddpctl.errors import NoInputError
from ddpctl.job.spec import JobSpec
from ddpctl.text import counted, one_line
from ddpwire import names
from ddpwire.run_files import NOTICE_EVENTS, STORE_SECRET

TRAINER = ("-m", "ddptrain")
VARIABLE = re.compile(r"\$(\{)?[A-Za-z_]\w*(?(1)\})")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The launch that the file and the flags request."""

    job: JobSpec
    target: str  # the target's name in the file, or its kind
    kind: str
    options: Any  # an instance of the kind's options dataclass
    target_source: str = ""  # where the target was set: "--target", the file's name, or the reason for the default
    cwd: str = field(default_factory=os.getcwd)
    name: str | None = None  # the run's exact name; None: a new name is chosen
    resumes: Any = None  # the Run from whose checkpoints it continues
    wait_s: int | None = None  # how long the launch may wait for free GPUs; None: it does not wait


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of one run that are known before any machine is contacted."""

    name: str  # the run's name
    job: JobSpec
    cwd: str  # where the ranks run: the project's folder
    folder: str  # the run's folder (ddpwire.run_files)
    checkpoint_dir: str
    uid: str = ""  # distinguishes runs of the same name; empty for a rendered spec, which can be started several times
    user: str = ""  # who launches the run
    resumes: str = ""  # the earlier run, if only the nodes can find out whether it has checkpoints
    wait_s: int | None = None  # how long the launch may wait for free GPUs; None: it does not wait

    @property
    def identity(self) -> dict[str, str]:
        """The environment variables with the run's unique ID and its user."""
        return {names.RUN_UID: self.uid, names.USER: self.user} if self.uid else {}

    @property
    def store(self) -> dict[str, str]:
        """The environment variable with the URL of the run's folder in an object store, if there is one."""
        url = self.job.checkpoint_dir
        return {names.CHECKPOINT_STORE: url if self.uid else f"{url}/{self.name}"} if url else {}


# Code for a node's own Python: it exits with a message if torch or ddprun is missing, and imports neither. It has no
# single quote, so that a shell script can quote it.
CHECK_PYTHON = (
    'import sys, importlib.util as u; u.find_spec("torch") or sys.exit("no torch in it: install ddpctl[train] there"); '
    'u.find_spec("ddprun") or sys.exit("no ddprun in it: install ddpctl[agent] there")'
)


def program(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the script or ``-m module`` that the ranks run, and its arguments.

    An empty command, or a command that begins with an option, runs ddptrain. A ``python`` at the beginning is removed.
    """
    if command and command[0] in ("python", "python3"):
        command = command[1:]
    if not command:
        return TRAINER
    if command[0] == "ddptrain":
        return (*TRAINER, *command[1:])
    if command[0].startswith("-") and command[0] != "-m":
        return (*TRAINER, *command)
    return command


def script_of(command: tuple[str, ...]) -> str | None:
    """Return the path of the script that the ranks run, or None if they run a module."""
    argv = program(command)
    return None if argv[0] == "-m" else argv[0]


def package_of(command: tuple[str, ...]) -> str | None:
    """Return the top-level package that the ranks run, or None if they run a script or ddptrain."""
    argv = program(command)
    return argv[1].partition(".")[0] if argv[0] == "-m" and len(argv) > 1 and argv[:2] != TRAINER else None


def title(job: JobSpec) -> str:
    """Return a short description of a run, such as ``2 nodes x 4 ranks of train.py``."""
    argv = program(job.command)
    script = argv[1] if argv[0] == "-m" else argv[0]
    spares = f", with {counted(job.spares, 'spare')}" if job.spares else ""
    size = f"{counted(job.nodes, 'node')} x {counted(job.local_world_size, 'rank')}"
    if job.is_uneven:
        size = f"{counted(job.nodes, 'node')} with {job.size} ranks"
    return f"{size} of {one_line(script)}{spares}"


def unused_gpus(job: JobSpec) -> str:
    """Return a warning if ddptrain does not use all GPUs, and otherwise an empty string."""
    if job.device == "cpu" or job.ranks in (None, job.gpus) or program(job.command)[:2] != TRAINER:
        return ""
    used = f"{job.local_world_size} of the {job.max_gpus} GPUs of a node"
    return f"ddptrain uses one GPU per rank, so it uses only {used}; to use all of them, do not set ranks"


def unexpanded(job: JobSpec) -> str:
    """Return a warning if ``job.env`` or an argument refers to a variable, or ``job.env`` to a home folder, else an
    empty string. Of an argument, only the variables are shown, because the rest may be secret.
    """
    env = [name for name, value in job.env.items() if re.search(rf"{VARIABLE.pattern}|(^|:)~/", value)]
    command = dict.fromkeys(match[0] for argument in job.command for match in VARIABLE.finditer(argument))
    unexpanded = [f"{key}: {', '.join(names)}" for key, names in (("env", env), ("command", command)) if names]
    return f"{'; '.join(unexpanded)}: no shell expands $ and ~: write the whole value" if unexpanded else ""


def command_line(job: JobSpec) -> str:
    """Return the script or module and its arguments as one shell line."""
    argv = program(job.command)
    return one_line(shlex.join(argv[1:] if argv[:2] == TRAINER else argv))


def contract(plan: Plan, *, node: int, addr: str, port: str) -> dict[str, str]:
    """Return the environment variables of a node's ddprun.

    ``addr`` and ``port`` are the address and the port of the rendezvous on node 0.
    """
    return {
        names.NNODES: plan.job.nodes,
        names.NPROC_PER_NODE: str(plan.job.ranks or plan.job.gpus_of(node)),
        names.NODE_RANK: str(node),
        names.NODE_MASTER_ADDR: addr,
        names.NODE_MASTER_PORT: port,
        names.RUN_ID: plan.name,
        names.RUN_DIR: plan.folder,
        names.CHECKPOINT_DIR: plan.checkpoint_dir,
        names.SECRET_FILE: f"{plan.folder}/{STORE_SECRET}",
        **plan.store,
        **plan.identity,
    }


def ddprun_args(plan: Plan, *, deadline: bool = True) -> tuple[str, ...]:
    """Return the arguments of a node's ddprun, which end with the script and its arguments.

    ``deadline`` is whether ddprun enforces the time limit. It is False if a scheduler enforces it.
    """
    job = plan.job
    options: dict[str, float | None] = {
        "--spares": job.spares or None,
        "--grace": job.grace,
        "--restart-limit": job.max_restarts,
        "--join-timeout": job.join_timeout,
        "--hang-timeout": job.hang_timeout,
        "--setup-timeout": job.setup_timeout if job.node_setup else None,
        "--teardown-timeout": job.teardown_timeout if job.node_teardown else None,
        "--checkpoint-copies": job.checkpoint_copies if job.checkpoint_copies > 1 else None,
        "--deadline": job.time_limit_s if deadline else None,
    }
    given = ((flag, f"{value:.15g}") for flag, value in options.items() if value is not None)
    texts: list[tuple[str, str]] = [("--resumes", plan.resumes)] if plan.resumes else []
    texts += [("--stop-signal", job.stop_signal)] if job.stop_signal != "TERM" else []
    texts += [(f"--node-{when}", text) for when in ("setup", "teardown") for text in getattr(job, f"node_{when}")]
    texts += [("--notify", target) for target in job.notify]
    if job.notify and job.notify_on != NOTICE_EVENTS:
        texts += [("--notify-on", ",".join(job.notify_on))]
    return (*itertools.chain.from_iterable((*given, *texts)), *program(job.command))


def find_script(plan: Plan) -> Verb[None]:
    """Check that the script exists in the project's folder on this machine. Raises NoInputError."""
    if commands := look_for_script(plan):
        check_script(plan, *(yield commands))


def look_for_script(plan: Plan, host: Host | None = None) -> tuple[Command, ...]:
    """Return the command that checks whether the script exists, or an empty tuple if the ranks run a module."""
    script = script_of(plan.job.command)
    return (Command(argv=("test", "-f", script), cwd=plan.cwd, host=host, probe=True),) if script else ()


def check_script(plan: Plan, *outputs: Output, host: Host | None = None) -> None:
    """Raise NoInputError if ``outputs``, the outputs of ``look_for_script``, show that the script is missing."""
    if any(output.returncode == 1 for output in outputs):  # other codes: test(1) did not run
        where = f"{plan.cwd} on {host}" if host else plan.cwd
        raise NoInputError(f"{script_of(plan.job.command)}: no such script in {where}")
