"""The subcommands ``launch`` and ``render``, their flags, and the functions that make a launch request from the flags.

Each command imports most modules only when it runs. Otherwise --help would be slow.
"""

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddpctl.commands.arguments import DryRun, open_context, parse_time
from ddpctl.errors import ConfigError, UsageError, writing

if TYPE_CHECKING:
    from ddpctl.job.config import TargetFlags
    from ddpctl.operations.launcher import AppContext, Request
    from ddpctl.runs.run_store import Run

File = Annotated[
    Path | None,
    typer.Option("--file", "-f", envvar="DDPCTL_FILE", help="The configuration file [default: ddpctl.yaml, if any]."),
]


def _option(flag: str, *short: str, metavar: str, help: str) -> Any:  # noqa: A002 -- Typer's name for it
    """Return an option that an environment variable can also set. For example, DDPCTL_NODES sets --nodes."""
    variable = f"DDPCTL_{flag.removeprefix('--').replace('-', '_').upper()}"
    return typer.Option(flag, *short, envvar=variable, metavar=metavar, help=help)


Nodes = Annotated[
    str | None, _option("--nodes", "-n", metavar="N|MIN:MAX", help="Number of nodes, or an elastic range.")
]
Gpus = Annotated[
    str | None,
    _option("--gpus", "-g", metavar="G", help="GPUs per node. Each has one rank. Without GPUs, the ranks use the CPU."),
]
Target = Annotated[
    str | None,
    _option("--target", "-t", metavar="T", help="A target in the file, or local, ssh, slurm, kubernetes or kaggle."),
]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of ``launch`` and ``render``. A flag that is not given is None or False."""

    nodes: Nodes = None
    gpus: Gpus = None
    ranks: Annotated[
        str | None, _option("--ranks", metavar="R", help="Ranks per node, a divisor of --gpus [default: one per GPU].")
    ] = None
    target: Target = None
    file: File = None
    profile: Annotated[
        str | None, _option("--profile", "-p", metavar="P", help="The profile in the file that overrides the job.")
    ] = None
    device: Annotated[
        str | None,
        _option(
            "--device",
            metavar="auto|cuda|cpu",
            help="cuda requires GPUs. Without GPUs, auto uses the CPU (not on Kubernetes).",
        ),
    ] = None
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="A variable for all ranks. May be repeated.")
    ] = None
    name: Annotated[
        str | None, typer.Option("--name", metavar="RUN", help="The run's name [default: the job's name and a word].")
    ] = None
    port: Annotated[
        str | None, _option("--port", metavar="P", help="The rendezvous port on node 0 [default: a free port].")
    ] = None
    max_restarts: Annotated[
        str | None, _option("--max-restarts", metavar="N", help="Largest number of restarts after a failure.")
    ] = None
    cpus: Annotated[str | None, _option("--cpus", metavar="C", help="CPU cores per node.")] = None
    memory: Annotated[str | None, _option("--memory", metavar="SIZE", help="Memory per node, such as 64Gi.")] = None
    mount: Annotated[
        list[str] | None,
        typer.Option("--mount", metavar="SOURCE:PATH[:ro]", help="A folder for all nodes. May be repeated."),
    ] = None
    image: Annotated[str | None, _option("--image", metavar="REF", help="The container image of all nodes.")] = None
    workload: Annotated[
        str | None,
        _option("--kind", metavar="auto|pytorchjob|trainjob|job", help="Kubernetes only: the kind of workload."),
    ] = None
    replace_lost: Annotated[
        bool,
        typer.Option("--replace-lost", help="Kubernetes only: replace a pod whose machine is lost."),
    ] = False
    array: Annotated[
        str | None, _option("--array", metavar="0-3%2", help="Slurm only: run the job several times, as a job array.")
    ] = None
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="HOST", help="SSH machines only: do not use this host. May be repeated."),
    ] = None
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- SCRIPT ARGS...]",
            help="Your script (or -m MODULE) and its arguments, as for torchrun. Without a script, ddptrain runs and "
            "gets the arguments, for example ddpctl launch -- --epochs 3 (see ddptrain --help).",
            show_default=False,
        ),
    ] = None


JOB_FLAGS = (
    "nodes",
    "gpus",
    "ranks",
    "device",
    "port",
    "max_restarts",
    "cpus",
    "memory",
    "image",
)  # fields of JobSpec, which parses their text


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of Flags to ``command`` for Typer. ``command`` receives a Flags object as its first argument."""

    @wraps(command)
    def call(**given: Any) -> None:
        command(Flags(**{field.name: given.pop(field.name) for field in fields(Flags)}), **given)

    shared, own = inspect.signature(Flags).parameters, list(inspect.signature(command).parameters.values())[1:]
    parameters = [*shared.values(), *(option.replace(kind=option.KEYWORD_ONLY) for option in own)]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {option.name: option.annotation for option in parameters}
    return call


@with_flags
def launch(
    flags: Flags,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="RUN", help="Launch the job of RUN again, from its last checkpoint."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return at once. The run continues without this terminal.")
    ] = False,
    pull: Annotated[
        bool, typer.Option("--pull", help="Copy the results here when the run has ended, as ddpctl pull does.")
    ] = False,
    wait: Annotated[
        str | None,
        typer.Option("--wait", metavar="TIME", help="SSH machines only: wait up to TIME (2h, 30m) for free GPUs."),
    ] = None,
    doctor: Annotated[
        bool,
        typer.Option("--doctor", help="First run ddpctl doctor. Leave out bad SSH machines; reject other bad nodes."),
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Start a training and follow it to its end.

    The exit code is that of the run. The first Ctrl-C asks the ranks to save and stop; the exit code is then 130. The
    second Ctrl-C kills the ranks. If ddpctl ends, the run saves and ends too. With --detach, the run continues. With
    --resume, a program or arguments given here replace those of the earlier run.

    \b
    ddpctl launch --nodes 2 --gpus 4
    ddpctl launch --gpus 2 -- train.py --epochs 3
    ddpctl launch --detach && ddpctl logs -f
    """
    from ddpctl import targets
    from ddpctl.commands.explain import emit_end
    from ddpctl.operations import launcher
    from ddpctl.operations.doctor import only_sound

    context = open_context()
    request = _request(context, flags, resume)
    if pull and (detach or "pull" not in targets.capabilities(request.kind)):
        why = "--detach does not wait for the run" if detach else f"runs of kind {request.kind} write on this machine"
        raise UsageError(f"--pull: {why}", hint="ddpctl pull RUN copies the results of a run on other machines")
    if wait is not None:
        if "wait" not in targets.capabilities(request.kind):
            raise UsageError(f"--wait: not allowed with a target of kind {request.kind}, only with ssh")
        request = replace(request, wait_s=parse_time("--wait", wait, example="2h"))
    _warn(request)
    if dry_run:
        launcher.dry_run(context, request)
        return
    if doctor:
        request = only_sound(context, request)
    run = launcher.start(context, request, attached=not detach)
    if detach:
        context.emit(f"  commands     ddpctl logs -f {run.name}, ddpctl status {run.name}, ddpctl stop {run.name}")
        if not sys.stdout.isatty():
            print(run.name)  # for a script: run=$(ddpctl launch --detach)
        return
    state, code = launcher.follow(context, run, launched=True)
    emit_end(context, run, state, code)
    if pull and state.ended:
        print(launcher.pull(context, run))
    raise typer.Exit(int(code))


def _request(context: "AppContext", flags: Flags, resume: str | None) -> "Request":
    from ddpctl.operations import launcher
    from ddpctl.runs import run_store

    if resume is None:
        return request_of_flags(flags)
    if flags.file or flags.profile or flags.target or flags.workload:
        raise UsageError(
            "--resume: a resumed run keeps its target and the settings of its file: leave out -f, -p, -t and --kind"
        )
    old = run_store.load(context.root, resume)
    launcher.check_alone(context, old)
    return request_to_resume(flags, old)


@with_flags
def render(
    flags: Flags,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="The output folder, for targets that need several files."),
    ] = None,
) -> None:
    """Print a job as a file that runs without ddpctl."""
    from ddpctl import targets
    from ddpctl.execution.executor import Executor
    from ddpctl.operations import launcher

    request = request_of_flags(flags)
    _warn(request)
    plan = launcher.plan_of(request, request.name or request.job.name, Path())
    made = targets.make(request.kind, request.options)
    Executor(os.environ).perform(made.expect(plan))
    if out is None:
        print(made.render(plan), end="")
        return
    files, note = Executor(os.environ).perform(made.files(plan))
    if not files:
        raise UsageError(f"--out: a target of kind {request.kind} needs only one file: use ddpctl render > FILE")
    if note:
        print(f"ddpctl: {note}", file=sys.stderr)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text)
            print(out / name)


def _warn(request: "Request") -> None:
    from ddpctl.job.launch_plan import unexpanded, unused_gpus
    from ddpctl.job.secrets import exposed, exposed_arguments

    for warning in filter(
        None, (check(request.job) for check in (exposed, exposed_arguments, unused_gpus, unexpanded))
    ):
        print(f"ddpctl: {warning}", file=sys.stderr)


def _in_place_of_a_launcher(flags: Flags) -> Flags:
    """Return the flags that a command of another launcher after ``--`` stands for. Raises UsageError."""
    from ddpctl.job.other_launchers import translate

    translation = translate(flags.program or ())
    if translation is None:
        return flags
    values: dict[str, Any] = {
        flag.removeprefix("--").replace("-", "_"): value for flag, value in translation.flags.items()
    }
    for name, value in values.items():
        given = getattr(flags, name)
        if given not in (None, value):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} {given}: {translation.launcher} has {value}: give the number once")
    print(f"ddpctl: {translation}", file=sys.stderr)
    variables = [f"{name}={value}" for name, value in translation.env.items()]
    return replace(flags, program=list(translation.program), env=[*variables, *(flags.env or ())], **values)


def overrides(flags: Flags) -> dict[str, Any]:
    """Return the values of the flags that set a field of the job. A flag that is not given has the value None."""
    variables = {}
    for pair in flags.env or ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--env: '{key}' has no value: write --env {key}=VALUE")
        variables[key] = value
    given: dict[str, Any] = {name: getattr(flags, name) for name in JOB_FLAGS}
    program, mounts = tuple(flags.program or ()) or None, tuple(flags.mount or ()) or None
    return given | {"env": variables or None, "mounts": mounts, "command": program}


def target_flags(flags: Flags) -> "TargetFlags":
    """Return the target option that each flag sets, and the flag's value.

    The value is None if the flag is not given.
    """
    return {
        "--kind": ("workload", flags.workload),
        "--replace-lost": ("replace_lost", flags.replace_lost or None),
        "--array": ("array", flags.array),
        "--exclude": ("exclude", tuple(flags.exclude) if flags.exclude else None),
    }


def request_of_flags(flags: Flags) -> "Request":
    """Make a launch request from the file and the flags. Raises FileError, UsageError or NoInputError."""
    from ddpctl import targets
    from ddpctl.job import config
    from ddpctl.operations.launcher import Request

    _check_name(flags.name)
    flags = _in_place_of_a_launcher(flags)
    path = config.find_file(flags.file, Path.cwd())
    kind, why = targets.default_kind(os.environ)
    settings = config.load(
        file=path,
        profile=flags.profile,
        target=flags.target,
        overrides=overrides(flags),
        kinds=targets.kinds(),
        target_flags=target_flags(flags),
        default_kind=kind,
        default_why=why,
    )
    if settings.job.checkpoint_copies > 1 and "copies" not in targets.capabilities(settings.kind):
        raise ConfigError(f"checkpoint_copies: not allowed with a target of kind {settings.kind}, only with ssh")
    return Request(**vars(settings), cwd=str(Path.cwd()), name=flags.name)


def request_to_resume(flags: Flags, run: "Run") -> "Request":
    """Make a request that continues a run from its checkpoints. Flags override the run's settings.

    Raises UsageError.
    """
    from ddpctl import targets
    from ddpctl.job import config
    from ddpctl.job.launch_plan import command_line
    from ddpctl.operations.launcher import Request

    _check_name(flags.name)
    flags = _in_place_of_a_launcher(flags)
    given = {key: value for key, value in overrides(flags).items() if value is not None}
    env = {**run.job.env, **given.pop("env", {})}
    given["checkpoint_copies"] = 1  # the run may continue on fewer nodes than had copies
    settings = config.load(
        file=None,
        target="local",  # only the job is checked; the run keeps its own target
        overrides={**vars(run.job), "nodes": run.handle.get("nodes", run.job.nodes), **given, "env": env},
        kinds=targets.kinds(),
    )
    old_options = targets.fill_options(targets.options_type(run.kind), run.options)
    options, wrong = config.lay_over(old_options, target_flags(flags), run.kind, targets.kinds())
    if wrong:
        raise UsageError("\n".join(wrong))
    other = "" if settings.job.command == run.job.command else f", which ran {command_line(run.job)}"
    return Request(
        job=replace(settings.job, checkpoint_copies=run.job.checkpoint_copies),
        target=run.target,
        kind=run.kind,
        options=options,
        why=f"resumes {run.name}{other}",
        cwd=run.cwd,
        name=flags.name,
        resumes=run,
    )


def _check_name(name: str | None) -> None:
    from ddpctl.job.spec import NAME_PATTERN

    if name is not None and not NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"--name: '{name}' is not a name: use up to 40 lower-case letters, digits and '-', starting with a letter"
        )
