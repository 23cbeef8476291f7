"""The verb report: a run as one file, to keep or to mail."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ddpctl.commands.runs import RunName
from ddpctl.errors import CannotWriteError


def report(
    run: RunName = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where it is written [default: RUN.html here]."),
    ] = None,
) -> None:
    """Write a run into one HTML file, made to be mailed.

    How it ended and what the failing rank said, where its time went, loss and throughput as plots, what the nodes had
    and what was asked for. The file needs no network and runs no script. Secrets stand in it as [REDACTED]: the values
    of the variables that the job names as secrets, and what stands beside a name such as token or password.
    """
    from ddpctl import runs
    from ddpctl.desk import open_desk
    from ddpctl.redact import SHORTEST, can_be_sought
    from ddpctl.report import page
    from ddpctl.watch import material
    from ddpwire.folder import write_atomic

    desk = open_desk(os.environ)
    record = runs.load(desk.root, run)
    found = material.gather(desk, record)
    path = (output or Path(f"{record.name}.html")).absolute()
    values = {name: os.environ.get(name, "") for name in record.job.secrets}
    unsought = [name for name, value in values.items() if not can_be_sought(value)]
    text = page(found, values=values.values(), unsought=unsought)
    try:
        write_atomic(path, text.encode(errors="replace"))
        path.chmod(0o666 & ~_umask())
    except OSError as error:
        raise CannotWriteError(f"cannot write {path}: {error.strerror}") from None
    for said in (*found.silent, *found.torn):
        desk.say(said)
    if unsought:
        desk.say(
            f"{', '.join(unsought)}: not set here, or shorter than {SHORTEST} characters, so that the report may hold "
            "the value: make it where they are set, or look into it before you mail it"
        )
    print(path)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def register(app: typer.Typer) -> None:
    """Add this verb to the program."""
    app.command()(report)
