"""The verb top: a run as it trains, rank by rank."""

import json
import math
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ddpctl.commands.runs import RunName
from ddpctl.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from ddpctl.run import Run
    from ddpctl.watch.overview import Overview
    from ddpctl.watch.watcher import Watcher

ONCE_S = 1.0  # between the two looks of --once, from which it has a pace


def top(
    run: RunName = None,
    every: Annotated[
        float, typer.Option("--every", "-n", min=0.2, max=3600, metavar="SECONDS", help="How often it is refreshed.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once: of about a second.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document a line instead.")] = False,
) -> None:
    """Watch a run train, rank by rank.

    How fast it is, where the time of a step goes, which rank is slow. A row a rank: OWN is a rank's time of a step
    without waiting for the others; by it a straggler is told. Asked are the nodes themselves, over the way that the
    run was started; no Prometheus is needed. q leaves; the run goes on.
    """
    from ddpctl import runs
    from ddpctl.desk import open_desk
    from ddpctl.watch.watcher import Watcher

    if every != every:  # nan: neither too short nor too long
        raise UsageError("--every: nan is no number of seconds: from 0.2 to 3600")
    desk = open_desk(os.environ)
    record = runs.load(desk.root, run)
    watcher = Watcher(desk, record)
    if once:
        _once(watcher, record, as_json=as_json)
    elif as_json or not sys.stdout.isatty():
        _lines(watcher, every, as_json=as_json)
    else:
        _live(watcher, record, every)


def _once(watcher: "Watcher", run: "Run", *, as_json: bool) -> None:
    import time

    overview = watcher.look()
    if overview.ranks:
        time.sleep(ONCE_S)
        overview = watcher.look()
    if as_json:
        print(document(overview))
        return
    from ddpctl.commands.top_screen import screen

    console = _console()
    console.print(screen(overview, title=_title(run), width=console.width, height=None, plain=_plain(console)))


def _lines(watcher: "Watcher", every: float, *, as_json: bool) -> None:
    import time

    from ddpctl.commands.top_screen import line
    from ddpctl.run import ENDED

    while True:
        overview = watcher.look()
        print(document(overview) if as_json else line(overview), flush=True)
        if overview.state in ENDED:
            return
        time.sleep(every)


def document(overview: "Overview") -> str:
    """One line of JSON: numbers that are none are null; of the course what is known, each value with its time."""
    said = {name: _known(value) for name, value in asdict(overview).items() if name != "moments"}
    for name in ("throughput", "losses"):
        course = zip(overview.moments, getattr(overview, name), strict=True)
        said[name] = [{"time": at, "value": value} for at, value in course if _known(value) is not None]
    return json.dumps(said)


def _known(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _live(watcher: "Watcher", run: "Run", every: float) -> None:
    from rich.live import Live

    from ddpctl.commands.keys import listening, quits_within
    from ddpctl.commands.top_screen import screen
    from ddpctl.run import ENDED

    console = _console()

    def picture() -> object:
        height = console.height - 1
        return screen(overview, title=_title(run), width=console.width, height=height, plain=_plain(console))

    overview = watcher.look()
    with listening(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(picture(), refresh=True)  # type: ignore[arg-type]
            if overview.state in ENDED or quits_within(every):
                break
            overview = watcher.look()
    console.print(screen(overview, title=_title(run), width=console.width, height=None, plain=_plain(console)))


def _console() -> "Console":
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:  # rich would end the program with 1; a reader who has seen enough is no fault
            raise BrokenPipeError

    return Piped(highlight=False, markup=False, emoji=False)


def _plain(console: "Console") -> bool:
    return not console.encoding.lower().startswith("utf")


def _title(run: "Run") -> str:
    from ddpctl.plan import title
    from ddpctl.words import one_line

    where = run.kind if run.target == run.kind else f"{run.target}, {run.kind}"
    return one_line(f"{title(run.job)} on {where}")


def register(app: typer.Typer) -> None:
    """Add this verb to the program."""
    app.command()(top)
