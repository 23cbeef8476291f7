"""``ddpctl launch`` and ``ddpctl render``: from a command line to a run, or to a spec."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddpctl.commands.flags import (
    Array,
    Device,
    Env,
    File,
    Gpus,
    Image,
    Name,
    Nodes,
    Port,
    Profile,
    Program,
    Resume,
    TargetName,
    Workload,
)
from ddpctl.errors import UsageError
from ddpctl.spec import NAME_PATTERN
from ddpwire.exits import Exit

if TYPE_CHECKING:  # what a verb needs is imported when it runs: --help stays quick
    from ddpctl.launch import Request
    from ddpctl.run import Run


def launch(
    nodes: Nodes = None,
    gpus: Gpus = None,
    target: TargetName = None,
    file: File = None,
    profile: Profile = None,
    device: Device = None,
    env: Env = None,
    name: Name = None,
    port: Port = None,
    image: Image = None,
    workload: Workload = None,
    array: Array = None,
    resume: Resume = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return at once; the run goes on without this terminal.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and run nothing.")] = False,
    program: Program = None,
) -> None:
    """Start a training and follow it to its end.

    Exits with the run's own code. Ctrl-C once lets the ranks save and stop (130), twice kills them.
    An attached run ends with its ddpctl, and saves first; a detached one never does.

    \b
    ddpctl launch --nodes 2 --gpus 4
    ddpctl launch --gpus 2 -- train.py --epochs 3
    ddpctl launch --detach && ddpctl logs -f
    """
    from ddpctl import launch as verbs
    from ddpctl import runs

    desk = verbs.open_desk(os.environ)
    flags = _overrides(nodes, gpus, device, env, port, image, program)
    if resume is None:
        request = _request(flags, file, profile, target, name, workload)
    elif file or profile or target or workload:
        raise UsageError(
            "--resume: a resumed run keeps its target and its file's words: leave out -f, -p, -t and --kind"
        )
    else:
        old = runs.load(desk.root, resume)
        if not verbs.status(desk, (old,))[0].ended:
            raise UsageError(
                f"--resume: {old.name} goes on, and two trainings in its checkpoints would mix: stop it first"
            )
        request = _resumed(flags, old, name)
    request = _with_array(request, array)
    if dry_run:
        verbs.rehearse(desk, request)
        return
    run = verbs.start(desk, request, attached=not detach)
    if request.resumes and not runs.has_checkpoint(request.resumes):
        desk.say(f"  {request.resumes.name} left no checkpoint: it starts from the beginning")
    desk.say(f"  logs         {run.logs_at}")
    if detach:
        desk.say(f"  detached     ddpctl logs -f {run.name}, ddpctl status {run.name}, ddpctl stop {run.name}")
        if not sys.stdout.isatty():
            print(run.name)  # for a script: run=$(ddpctl launch --detach)
        return
    state, code = verbs.follow(desk, run)
    from ddpctl.commands.show import closing_lines

    for line in closing_lines(run, state, can_resume=runs.has_checkpoint(run)):
        desk.say(line)
    if code not in (state.code, Exit.OK):
        desk.say(f"  you pressed Ctrl-C: ddpctl exits with {code}")
    raise typer.Exit(int(code))


def render(
    nodes: Nodes = None,
    gpus: Gpus = None,
    target: TargetName = None,
    file: File = None,
    profile: Profile = None,
    device: Device = None,
    env: Env = None,
    name: Name = None,
    port: Port = None,
    image: Image = None,
    workload: Workload = None,
    array: Array = None,
    program: Program = None,
) -> None:
    """Print a job as a file that runs without ddpctl."""
    from ddpctl import launch as verbs
    from ddpctl import targets

    flags = _overrides(nodes, gpus, device, env, port, image, program)
    request = _with_array(_request(flags, file, profile, target, name, workload), array)
    plan = verbs.plan_of(request, request.name or request.job.name, Path())
    print(targets.make(request.kind, request.options).render(plan), end="")


def _overrides(
    nodes: str | None,
    gpus: str | None,
    device: str | None,
    env: list[str] | None,
    port: str | None,
    image: str | None,
    program: list[str] | None,
) -> dict[str, Any]:
    """The flags that are fields of a job; None: not given."""
    variables = {}
    for pair in env or ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--env: '{key}' has no value: write --env {key}=VALUE")
        variables[key] = value
    return {
        "nodes": nodes,
        "gpus": _number("--gpus", gpus),
        "device": device,
        "port": _number("--port", port),
        "image": image,
        "env": variables or None,
        "command": tuple(program) if program else None,
    }


def _number(flag: str, text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        raise UsageError(f"{flag}: '{text}' is no whole number") from None


def _request(
    flags: dict[str, Any],
    file: Path | None,
    profile: str | None,
    target: str | None,
    name: str | None,
    workload: str | None,
) -> "Request":
    """File and flags as one request."""
    from ddpctl import config, targets
    from ddpctl.launch import Request

    _check_name(name)
    found = config.find_file(file, Path.cwd())
    kind, why = targets.default_kind(os.environ)
    settings = config.load(
        file=found,
        profile=profile,
        target=target,
        overrides=flags,
        kinds=targets.kinds(),
        workload=workload,
        default_kind=kind,
        default_why=why,
    )
    return Request(
        job=settings.job,
        target=settings.target,
        kind=settings.kind,
        options=settings.options,
        why=settings.why,
        cwd=str(Path.cwd()),
        name=name,
    )


def _with_array(request: "Request", array: str | None) -> "Request":
    """The request as an array of jobs, where the target has such."""
    from dataclasses import replace

    from ddpctl import targets
    from ddpctl.fields import fields_of

    if array is None:
        return request
    if (field := fields_of(targets.options_type(request.kind)).get("array")) is None:
        raise UsageError(f"--array: the target {request.target} ({request.kind}) has no arrays of jobs: Slurm has")
    try:
        for check in field.checks:
            check(array)
    except ValueError as error:
        raise UsageError(f"--array: '{array}' is not allowed: {error}") from None
    return replace(request, options=replace(request.options, array=array))


def _resumed(flags: dict[str, Any], run: "Run", name: str | None) -> "Request":
    """A run's record, with flags laid over its job, as a request that goes on from its checkpoints."""
    from ddpctl import config, targets
    from ddpctl.launch import Request

    _check_name(name)
    given = {key: value for key, value in flags.items() if value is not None}
    env = {**run.job.env, **given.pop("env", {})}
    settings = config.load(
        file=None,
        profile=None,
        target="local",  # the job is what is checked; the run keeps its own target
        overrides={**vars(run.job), **given, "env": env},
        kinds=targets.kinds(),
    )
    return Request(
        job=settings.job,
        target=run.target,
        kind=run.kind,
        options=targets.fill_options(run.kind, run.options),
        why=f"resumes {run.name}",
        cwd=run.cwd,
        name=name,
        resumes=run,
    )


def _check_name(name: str | None) -> None:
    if name is not None and not NAME_PATTERN.fullmatch(name):
        raise UsageError(f"--name: '{name}' is no name: lower-case letters, digits and '-', a letter first, at most 40")


def register(app: typer.Typer) -> None:
    """Add these verbs to the program."""
    app.command()(launch)
    app.command()(render)
