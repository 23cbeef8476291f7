"""The verbs that go where a run is: attach, exec, shell."""

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ddpctl.commands.runs import RunName
from ddpctl.errors import NoInputError, UsageError

if TYPE_CHECKING:
    from ddpctl.desk import Desk
    from ddpctl.run import Run

Node = Annotated[int, typer.Option("--node", min=0, metavar="K", help="Which node, from 0.")]


def _find(name: str | None) -> "tuple[Desk, Run]":
    """A run that goes on."""
    from ddpctl import launch, runs
    from ddpctl.desk import open_desk

    desk = open_desk(os.environ)
    run = runs.load(desk.root, name)
    (state,) = launch.status(desk, (run,))
    if state.ended:
        raise NoInputError(f"{run.name} has ended ({state.state}): ddpctl status {run.name} and ddpctl logs {run.name}")
    return desk, run


def attach(
    run: RunName = None,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, metavar="N", help="Begin with the last N lines of each log.")
    ] = None,
) -> None:
    """Follow a run to its end, as if it had been launched here.

    Exits with the run's own code. Ctrl-C once lets the ranks save and stop (130), twice kills them;
    ddpctl logs -f only looks.
    """
    from ddpctl import launch, runs
    from ddpctl.commands.show import closing_lines

    desk, record = _find(run)
    state, code = launch.follow(desk, record, tail=tail)
    for line in closing_lines(record, state, can_resume=runs.has_checkpoint(record), code=code):
        desk.say(line)
    raise typer.Exit(int(code))


def execute(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or its beginning.")],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The command and its arguments.")],
    node: Node = 0,
) -> None:
    """Run a command where a node of a run is.

    That is in its container, or on its machine where there is none.

    \b
    ddpctl exec night --node 1 -- nvidia-smi
    """
    from ddpctl import launch

    desk, record = _find(run)
    tty = sys.stdin.isatty() and sys.stdout.isatty()
    raise typer.Exit(launch.execute(desk, record, node=node, argv=tuple(command), tty=tty))


def shell(run: RunName = None, node: Node = 0) -> None:
    """Open a shell where a node of a run is."""
    from ddpctl import launch

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("shell: no terminal here; ddpctl exec RUN -- COMMAND runs a command without one")
    desk, record = _find(run)
    raise typer.Exit(launch.execute(desk, record, node=node, argv=(), tty=True))


def register(app: typer.Typer) -> None:
    """Add these verbs to the program."""
    app.command()(attach)
    app.command(name="exec")(execute)
    app.command()(shell)
