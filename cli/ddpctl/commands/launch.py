"""``ddpctl launch`` and ``ddpctl render``: from a command line to a run, or to a spec."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from ddpctl.desk import Request

# What a verb needs is imported when it runs: --help stays quick.


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
    from ddpctl.commands.request import of_flags, overrides, resumed, with_array
    from ddpctl.desk import open_desk

    desk = open_desk(os.environ)
    flags = overrides(nodes, gpus, device, env, port, image, program)
    if resume is None:
        request = of_flags(flags, file, profile, target, name, workload)
    elif file or profile or target or workload:
        raise UsageError(
            "--resume: a resumed run keeps its target and its file's words: leave out -f, -p, -t and --kind"
        )
    else:
        old = runs.load(desk.root, resume)
        verbs.check_alone(desk, old)
        request = resumed(flags, old, name)
    request = with_array(request, array)
    _warn(request)
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

    for line in closing_lines(run, state, can_resume=runs.has_checkpoint(run), code=code):
        desk.say(line)
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
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Write it into a folder; for kaggle the notebook and its metadata."
        ),
    ] = None,
    program: Program = None,
) -> None:
    """Print a job as a file that runs without ddpctl."""
    from ddpctl import launch as verbs
    from ddpctl import targets
    from ddpctl.commands.request import of_flags, overrides, with_array
    from ddpctl.desk import open_desk
    from ddpctl.runner import Runner

    flags = overrides(nodes, gpus, device, env, port, image, program)
    request = with_array(of_flags(flags, file, profile, target, name, workload), array)
    _warn(request)
    plan = verbs.plan_of(request, request.name or request.job.name, Path())
    made = targets.make(request.kind, request.options)
    if isinstance(made, targets.Expecting):
        Runner(os.environ).perform(made.expect(plan))
    if out is None:
        print(made.render(plan), end="")
        return
    if not isinstance(made, targets.Filing):
        raise UsageError(f"--out: a target of kind {request.kind} has one file: ddpctl render > FILE")
    desk = open_desk(os.environ)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in desk.runner.perform(made.files(plan)).items():
        (out / name).write_text(text)
        print(out / name)


def _warn(request: "Request") -> None:
    from ddpctl.secrets import exposed, exposed_arguments

    for warning in filter(None, (exposed(request.job), exposed_arguments(request.job))):
        print(f"ddpctl: {warning}", file=sys.stderr)


def register(app: typer.Typer) -> None:
    """Add these verbs to the program."""
    app.command()(launch)
    app.command()(render)
