"""The verb that takes runs away: rm. It asks nothing: --dry-run says beforehand what would be lost."""

import os
import re
import time
from typing import Annotated

import typer

from ddpctl.commands.runs import complete_run
from ddpctl.errors import UsageError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def rm(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Runs' whole names.", autocompletion=complete_run)
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="AGE", help="Every ended run that was started longer ago: 30d, 12h."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be lost.")] = False,
) -> None:
    """Remove ended runs, checkpoints included.

    A run's record and folder go, and what it left where it ran. Nothing outside of the run's own folders is touched.
    """
    from ddpctl import removal, runs
    from ddpctl.commands import show
    from ddpctl.desk import open_desk

    if bool(names) == bool(older_than):
        raise UsageError("rm: name runs, or give --older-than 30d (ddpctl ps lists them)")
    desk = open_desk(os.environ)
    if older_than:
        before = time.time() - seconds(older_than)
        asked = tuple(run for run in runs.load_all(desk.root) if run.created < before)
    else:
        asked = tuple(runs.load(desk.root, name, whole=True) for name in dict.fromkeys(names or ()))
    leavers, refused = removal.choose(desk, asked)
    if refused and not older_than:  # who names runs has all of them removed, or none
        raise type(refused[0])("\n".join(map(str, refused)))
    for error in refused:
        desk.say(str(error))
    places = [place for one in leavers for place in one.left]
    for one in leavers:
        found = one.left if dry_run else removal.remove(desk, one)
        for line in show.removed_lines(one.run, found, dry_run=dry_run, others=places):
            print(line)
    if not leavers:
        desk.say(f"nothing to remove: no ended run was started more than {older_than} ago")


def seconds(age: str) -> int:
    """``30d`` in seconds. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", age)
    if not match:
        raise UsageError(f"--older-than: {age!r} is not allowed: a whole number and s, m, h or d, such as 30d")
    return int(match[1]) * _SECONDS[match[2]]


def register(app: typer.Typer) -> None:
    """Add this verb to the program."""
    app.command()(rm)
