"""The verbs that let a run rest: suspend and resume."""

import os
from typing import Annotated

import typer

RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's whole name.")]


def suspend(run: RunName) -> None:
    """Give a run's machines back, and keep the run.

    For targets that can: kubernetes. Its ranks save and stop; ddpctl resume lets it go on from its last checkpoint.
    """
    _set(run, again=False)


def resume(run: RunName) -> None:
    """Let a suspended run go on. A run that has ended goes on with ddpctl launch --resume."""
    _set(run, again=True)


def _set(name: str, *, again: bool) -> None:
    from ddpctl import launch, runs
    from ddpctl.desk import open_desk
    from ddpctl.errors import UsageError

    desk = open_desk(os.environ)
    run = runs.load(desk.root, name, whole=True)
    (state,) = launch.status(desk, (run,))
    if state.ended:
        raise UsageError(
            f"{run.name} has ended already ({state.state}): ddpctl launch --resume {run.name} goes on from it"
        )
    launch.suspend(desk, run, again=again)
    if again:
        desk.say(f"{run.name} goes on: ddpctl logs -f {run.name}")
    else:
        desk.say(
            f"{run.name} is suspended: its ranks have {run.job.grace:g} s to save; ddpctl resume {run.name} goes on"
        )


def register(app: typer.Typer) -> None:
    """Add these verbs to the program."""
    app.command()(suspend)
    app.command()(resume)
