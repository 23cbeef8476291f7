"""The subcommands ``launch`` and ``render``, their flags, and the functions that make a launch request from the flags.

The file is read by a module that takes time to import, so that only a command that reads a file imports it.
"""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from ddpctl import targets
from ddpctl.commands.arguments import DryRun, parse_time
from ddpctl.commands.explain import emit_end
from ddpctl.errors import ConfigError, UsageError, writing
from ddpctl.execution.executor import Executor
from ddpctl.job.launch_plan import Request, command_line, script_of, unexpanded, unused_gpus
from ddpctl.job.secrets import exposed, exposed_arguments
from ddpctl.job.spec import NAME_PATTERN
from ddpctl.operations import checks, launcher
from ddpctl.operations.launcher import AppContext, open_context
from ddpctl.runs import run_store
from ddpctl.runs.run_store import Run


def _option(*names: str, metavar: str, help: str | None = None) -> Any:  # noqa: A002 -- Typer's name for it
    """Return an option that an environment variable can also set. For example, DDPCTL_NODES sets --nodes."""
    variable = f"DDPCTL_{names[0].removeprefix('--').replace('-', '_').upper()}"
    return typer.Option(*names, envvar=variable, metavar=metavar, help=help)


Nodes = Annotated[str | None, _option("--nodes", "-n", metavar="N|MIN:MAX")]
Gpus = Annotated[str | None, _option("--gpus", "-g", metavar="G")]
Target = Annotated[
    str | None,
    _option("--target", "-t", metavar="T", help="A target in the file, or local, ssh, slurm, kubernetes or kaggle."),
]
File = Annotated[
    Path | None, _option("--file", "-f", metavar="PATH", help="The configuration file [default: ddpctl.yaml, if any].")
]
PROGRAM = (
    "Your script (or -m MODULE) and its arguments, as for torchrun. Without a script, ddptrain runs and gets the "
    "arguments, for example -- --epochs 3 (see ddptrain --help)."
)

# The flags of launch and render. A flag whose name is that of a field of JobSpec or of an option of a target sets this
# field, which parses its text and documents it.
FLAGS: Mapping[str, Any] = {
    "nodes": Nodes,
    "spares": Annotated[str | None, _option("--spares", metavar="N")],
    "gpus": Gpus,
    "ranks": Annotated[str | None, _option("--ranks", metavar="R")],
    "target": Target,
    "file": File,
    "profile": Annotated[
        str | None, _option("--profile", "-p", metavar="P", help="The profile in the file that overrides the job.")
    ],
    "device": Annotated[str | None, _option("--device", metavar="auto|cuda|cpu")],
    "env": Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V")],
    "name": Annotated[
        str | None, typer.Option("--name", metavar="RUN", help="The run's name [default: the job's name and a word].")
    ],
    "port": Annotated[str | None, _option("--port", metavar="P")],
    "max_restarts": Annotated[str | None, _option("--max-restarts", metavar="N")],
    "cpus": Annotated[str | None, _option("--cpus", metavar="C")],
    "memory": Annotated[str | None, _option("--memory", metavar="SIZE")],
    "mounts": Annotated[list[str] | None, typer.Option("--mount", metavar="SOURCE:PATH[:ro]")],
    "image": Annotated[str | None, _option("--image", metavar="REF")],
    "workload": Annotated[str | None, _option("--kind", metavar="auto|pytorchjob|trainjob|job")],
    "replace_lost": Annotated[bool | None, typer.Option("--replace-lost")],
    "array": Annotated[str | None, _option("--array", metavar="0-3%2")],
    "wheelhouse": Annotated[str | None, _option("--wheelhouse", metavar="DIR")],
    "exclude": Annotated[list[str] | None, typer.Option("--exclude", metavar="HOST")],
    "command": Annotated[
        list[str] | None, typer.Argument(metavar="[-- SCRIPT ARGS...]", help=PROGRAM, show_default=False)
    ],
}
Flags = Mapping[str, Any]  # the value of each given flag, by its name in FLAGS


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add FLAGS to ``command`` for Typer. ``command`` receives those that are given as its first argument."""

    @wraps(command)
    def call(**values: Any) -> None:
        flags = {name: value for name in FLAGS if (value := values.pop(name)) not in (None, [])}
        command(flags, **values)

    kind = inspect.Parameter.KEYWORD_ONLY
    shared = [inspect.Parameter(name, kind, default=None, annotation=hint) for name, hint in FLAGS.items()]
    own = [option.replace(kind=kind) for option in list(inspect.signature(command).parameters.values())[1:]]
    call.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    call.__annotations__ = {option.name: option.annotation for option in (*shared, *own)}
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
    context = open_context()
    request = _request(context, flags, resume)
    if pull and (detach or "pull" not in targets.capabilities(request.kind)):
        reason = (
            "--detach does not wait for the run" if detach else f"runs of kind {request.kind} write on this machine"
        )
        raise UsageError(f"--pull: {reason}", hint="ddpctl pull RUN copies the results of a run on other machines")
    if wait is not None:
        if "wait" not in targets.capabilities(request.kind):
            raise UsageError(f"--wait: not allowed with a target of kind {request.kind}, only with ssh")
        request = replace(request, wait_s=parse_time("--wait", wait, example="2h"))
    _warn(request)
    if dry_run:
        launcher.dry_run(context, request)
        return
    if doctor:
        request = checks.only_sound(context, request)
    run = launcher.start(context, request, attached=not detach)
    if detach:
        context.emit(f"  commands     ddpctl logs -f {run.name}, ddpctl status {run.name}, ddpctl stop {run.name}")
        if not sys.stdout.isatty():
            print(run.name)  # for a script: run=$(ddpctl launch --detach)
        return
    state, code = launcher.follow(context, run, launched=True)
    emit_end(context, run, state, code)
    if not code:
        name_rehearse(context, run)
    if pull and state.ended:
        print(launcher.pull(context, run))
    raise typer.Exit(int(code))


def name_rehearse(context: AppContext, run: Run) -> None:
    """After the first run of a script that has succeeded, say once that the script can be rehearsed."""
    marker = context.root / checks.CHECKS / "rehearse-named"
    if (script := script_of(run.job.command)) and not marker.exists():
        with suppress(OSError):
            marker.parent.mkdir(exist_ok=True)
            marker.touch()
            command = f"ddpctl rehearse -- {command_line(run.job)}"
            context.emit(f"  next         {command} shows what {script} loses when ranks are killed or stopped")


def _request(context: AppContext, flags: Flags, resume: str | None) -> Request:
    if resume is None:
        return request_of_flags(flags)
    if {"file", "profile", "target", "workload"} & flags.keys():
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


def _warn(request: Request) -> None:
    for warning in filter(
        None, (check(request.job) for check in (exposed, exposed_arguments, unused_gpus, unexpanded))
    ):
        print(f"ddpctl: {warning}", file=sys.stderr)


def _values(flags: Flags) -> dict[str, Any]:
    """Return the values of the flags that set a field of the job or an option of a target.

    A command of another launcher after ``--`` is replaced by the flags that it stands for. Raises UsageError.
    """
    from ddpctl.job.other_launchers import translate

    of_request = ("target", "file", "profile", "name")
    values = {name: value for name, value in flags.items() if name not in of_request and value is not None}
    if "name" in flags and not NAME_PATTERN.fullmatch(flags["name"]):
        expected = "use up to 40 lower-case letters, digits and '-', starting with a letter"
        raise UsageError(f"--name: '{flags['name']}' is not a name: {expected}")
    env: dict[str, str] = {}
    if translation := translate(flags.get("command", ())):
        for flag, value in translation.flags.items():
            given = values.setdefault(flag.removeprefix("--").replace("-", "_"), value)
            if given != value:
                raise UsageError(f"{flag} {given}: {translation.launcher} has {value}: give the number once")
        print(f"ddpctl: {translation}", file=sys.stderr)
        env.update(translation.env)
        values["command"] = translation.program
    for pair in flags.get("env", ()):
        name, equals, env[name] = pair.partition("=")
        if not equals:
            raise UsageError(f"--env: '{pair}' has no value: write --env {pair}=VALUE")
    return values | ({"env": env} if env else {})


def request_of_flags(flags: Flags) -> Request:
    """Make a launch request from the file and the flags. Raises FileError, UsageError or NoInputError."""
    from ddpctl.job import config

    values = _values(flags)
    request = config.load(
        file=config.find_file(flags.get("file"), Path.cwd()),
        profile=flags.get("profile"),
        target=flags.get("target"),
        flags=values,
        kinds=targets.kinds(),
        default=targets.default_kind(os.environ),
    )
    _check_capabilities(request)
    return replace(request, name=flags.get("name"))


def _check_capabilities(request: Request) -> None:
    """Check that the target can run what the job asks for. Raises ConfigError."""
    if request.job.checkpoint_copies > 1 and "copies" not in targets.capabilities(request.kind):
        raise ConfigError(f"checkpoint_copies: not allowed with a target of kind {request.kind}, only with ssh")
    if request.job.spares and "spares" not in targets.capabilities(request.kind):
        hint = "leave out spares" + (": Kubernetes itself replaces a lost pod" if request.kind == "kubernetes" else "")
        raise ConfigError(
            f"spares: not allowed with a target of kind {request.kind}, only with ssh and slurm", hint=hint
        )
    if request.job.is_uneven and "uneven" not in targets.capabilities(request.kind):
        raise ConfigError(
            f"gpus: a list is not allowed with a target of kind {request.kind}, only with ssh and local",
            hint="give one number, the same for all nodes",
        )


def request_to_resume(flags: Flags, run: Run) -> Request:
    """Make a request that continues a run from its checkpoints. Flags override the run's settings.

    Raises UsageError.
    """
    from ddpctl.job import config

    values = _values(flags)
    # The run may continue on fewer nodes than had copies.
    job = replace(run.job, nodes=run.handle.get("nodes", run.job.nodes), checkpoint_copies=1)
    options = targets.fill_options(targets.options_type(run.kind), run.options)
    earlier = Request(job=job, target=run.target, kind=run.kind, options=options)
    request = config.load(earlier=earlier, flags=values, kinds=targets.kinds())
    _check_capabilities(request)
    other = "" if request.job.command == job.command else f", which ran {command_line(job)}"
    return replace(
        request,
        job=replace(request.job, checkpoint_copies=run.job.checkpoint_copies),
        target_source=f"resumes {run.name}{other}",
        cwd=run.cwd,
        name=flags.get("name"),
        resumes=run,
    )
