"""From a job to nodes: what each node's ddprun is told. Pure; knows no target.

``contract`` returns the variables of ``ddpwire.names``; the target passes in address and port.
"""

import shlex
from dataclasses import dataclass

from ddpctl.command import Command, Host, Output, Verb
from ddpctl.errors import NoInputError
from ddpctl.spec import JobSpec
from ddpctl.text import one_line
from ddpwire import names

TRAINER = ("-m", "ddptrain")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run of a job: everything that is known before a machine is asked."""

    run: str  # the run's name
    job: JobSpec
    cwd: str  # where the ranks run: the project's folder
    run_dir: str  # the run's folder (ddpwire.run_files)
    checkpoint_dir: str
    uid: str = ""  # tells runs of one name apart; empty: a spec is rendered, which may be started many times
    user: str = ""  # who launches the run
    wait_s: int | None = None  # how long the launch may wait for free GPUs; None: it does not

    @property
    def identity(self) -> dict[str, str]:
        """What a node is told of the run beside its name, in ``ddpwire.names``' variables."""
        return {names.RUN_UID: self.uid, names.USER: self.user} if self.uid else {}

    @property
    def world_size(self) -> int:
        """Ranks over all nodes, when all come."""
        return self.job.world_size


def program(command: tuple[str, ...]) -> tuple[str, ...]:
    """What ddprun runs: ``script args`` or ``-m module args``.

    No command, or one that begins with an option, is our own trainer's; a ``python`` in front is dropped,
    since a rank is a Python process anyway.
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
    """The file that must be there for the ranks to start; None for a module."""
    words = program(command)
    return None if words[0] == "-m" else words[0]


def package_of(command: tuple[str, ...]) -> str | None:
    """The package, or the module, that must be there for the ranks to start; None for a script, and for our trainer."""
    words = program(command)
    return words[1].partition(".")[0] if words[0] == "-m" and len(words) > 1 and words[:2] != TRAINER else None


def title(job: JobSpec) -> str:
    """``2 nodes x 4 ranks of train.py``: the run in half a line."""
    words = program(job.command)
    what = words[1] if words[0] == "-m" else words[0]
    return f"{counted(job.nodes, 'node')} x {counted(job.local_world_size, 'rank')} of {one_line(what)}"


def counted(number: int | str, noun: str) -> str:
    """``1 node``, ``2 nodes``, ``1:4 nodes``."""
    return f"{number} {noun}" if str(number) == "1" else f"{number} {noun}s"


def unused_gpus(job: JobSpec) -> str:
    """A line if our own trainer leaves GPUs unused; empty: it does not, or the script is another."""
    if job.device == "cpu" or job.local_world_size == job.gpus or program(job.command)[:2] != TRAINER:
        return ""
    used = f"{job.local_world_size} of a node's {job.gpus} GPUs"
    return f"ddptrain uses one GPU per rank: {used}; leave ranks out to use all"


def command_line(job: JobSpec) -> str:
    """The program as one would type it, on one line."""
    words = program(job.command)
    return one_line(shlex.join(words[1:] if words[:2] == TRAINER else words))


def contract(plan: Plan, *, node: int, addr: str, port: str) -> dict[str, str]:
    """The environment that tells a node its position, and the run's own variables. ``ddprun_args`` repeats none."""
    return {
        names.NNODES: plan.job.nodes,
        names.NPROC_PER_NODE: str(plan.job.local_world_size),
        names.NODE_RANK: str(node),
        names.NODE_MASTER_ADDR: addr,
        names.NODE_MASTER_PORT: port,
        names.RUN_ID: plan.run,
        names.RUN_DIR: plan.run_dir,
        names.CHECKPOINT_DIR: plan.checkpoint_dir,
        **plan.identity,
    }


def ddprun_args(plan: Plan, *, deadline: bool = True) -> tuple[str, ...]:
    """The arguments of a node's ddprun: its options, then the program.

    ``deadline``: it keeps the time limit by itself, from its own start on; False where a scheduler tells it.
    """
    job = plan.job
    options = ["--grace", f"{job.grace:g}"]
    if job.max_restarts is not None:
        options += ["--restart-limit", str(job.max_restarts)]
    if job.join_timeout is not None:
        options += ["--join-timeout", f"{job.join_timeout:g}"]
    if deadline and job.time_limit_s is not None:
        options += ["--deadline", str(job.time_limit_s)]
    return (*options, *program(job.command))


def find_script(plan: Plan) -> Verb[None]:
    """Look for the script in the project's folder on this machine. Raises NoInputError."""
    if commands := look_for_script(plan):
        check_script(plan, *(yield commands))


def look_for_script(plan: Plan, host: Host | None = None) -> tuple[Command, ...]:
    """The command that looks for it there; none for a module."""
    script = script_of(plan.job.command)
    return (Command(argv=("test", "-f", script), cwd=plan.cwd, host=host, probe=True),) if script else ()


def check_script(plan: Plan, *outputs: Output, host: Host | None = None) -> None:
    """See what ``look_for_script`` was answered. Raises NoInputError where test(1) says that it is not there.

    Anything but 1 is no answer (no test(1), no time, no connection), and no reason to refuse the launch.
    """
    if any(output.returncode == 1 for output in outputs):
        where = f"{plan.cwd} of {host}" if host else plan.cwd
        raise NoInputError(f"{script_of(plan.job.command)}: no such script in {where}")
