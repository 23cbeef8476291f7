"""``ddpctl pull``: what a run has written elsewhere, brought here."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ddpctl.commands.runs import RunName


def pull(
    run: RunName = None,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="FOLDER", help="Where to [default: output, in the run's folder].")
    ] = None,
) -> None:
    """Bring here what a run has written: checkpoints, logs, weights.

    For targets whose runs write where only their own client can read: kaggle.
    """
    from ddpctl import launch, runs
    from ddpctl.desk import open_desk

    desk = open_desk(os.environ)
    record = runs.load(desk.root, run)
    folder = into or Path(record.folder) / "output"
    launch.pull(desk, record, folder)
    desk.say(f"what {record.name} has written is in {folder}")
    print(folder)


def register(app: typer.Typer) -> None:
    """Add the verb to the program."""
    app.command()(pull)
