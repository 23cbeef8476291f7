"""The subcommand ``top``. It shows the ranks of a run while the run trains."""

import contextlib
import json
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ddpctl.commands.arguments import RunName, Task, find_run
from ddpctl.errors import UsageError
from ddpctl.job.launch_plan import title
from ddpctl.runs.run_status import ENDED
from ddpctl.runs.run_store import Run
from ddpctl.text import one_line
from ddpctl.watch.snapshot import Snapshot, Watcher

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def top(
    run: RunName = None,
    task: Task = None,
    every: Annotated[
        float, typer.Option("--every", "-n", min=0.2, max=3600, metavar="SECONDS", help="Seconds between two updates.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the table once, after about a second.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document on each line instead.")] = False,
) -> None:
    """Watch the ranks of a run while it trains.

    The screen shows the speed, how the time of a step is spent, and which rank is slow. The column OWN has the time of
    a step without the time in which the rank waits for other ranks. A straggler has the largest value. ddpctl asks the
    nodes directly and needs no Prometheus. Press q to leave. The run continues.
    """
    if every != every:  # NaN, which passes min and max
        raise UsageError("--every: nan is not allowed: expected 0.2 to 3600 seconds")
    context, record = find_run(run, task)
    watcher = Watcher(context, record)
    snapshot = watcher.probe()
    if once and snapshot.ranks:
        time.sleep(1.0)  # the speed is computed from two probes
        snapshot = watcher.probe()
    if not as_json and (once or sys.stdout.isatty()):
        console = _console()
        if not once:
            snapshot = _live(console, watcher, snapshot, record, every)
        console.print(_screen(console, snapshot, record, height=None))
        return
    from ddpctl.commands.top_screen import line

    while True:
        print(document(snapshot) if as_json else line(snapshot), flush=True)
        if once or snapshot.state in ENDED:
            return
        time.sleep(every)
        snapshot = watcher.probe()


def document(snapshot: Snapshot) -> str:
    """Return the snapshot as one line of JSON. NaN becomes null.

    Each item of ``throughput`` and ``losses`` has a time and a value.
    """
    fields = json.loads(json.dumps(asdict(snapshot)), parse_constant=lambda _: None)
    moments = fields.pop("moments")
    for name in ("throughput", "losses"):
        history = zip(moments, fields[name], strict=True)
        fields[name] = [{"time": at, "value": value} for at, value in history if value is not None]
    return json.dumps(fields)


def _live(console: "Console", watcher: Watcher, snapshot: Snapshot, run: Run, every: float) -> Snapshot:
    """Draw the screen until the run ends or the user leaves. Return the last snapshot."""
    from rich.live import Live

    with listening(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_screen(console, snapshot, run, height=console.height - 1), refresh=True)
            if snapshot.state in ENDED or quits_within(every):
                return snapshot
            snapshot = watcher.probe()


def _console() -> "Console":
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1, but a closed pipe is no error
            raise BrokenPipeError

    return Piped(highlight=False, markup=False, emoji=False)


def _screen(console: "Console", snapshot: Snapshot, run: Run, *, height: int | None) -> "RenderableType":
    from ddpctl.commands.top_screen import screen

    where = run.kind if run.target == run.kind else f"{run.target}, {run.kind}"
    heading = one_line(f"{title(run.job)} on {where}")
    plain = not console.encoding.lower().startswith("utf")
    return screen(snapshot, title=heading, width=console.width, height=height, plain=plain)


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Put the terminal into cbreak mode, so that each key can be read at once. Do nothing without a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def quits_within(seconds: float) -> bool:
    """Wait at most ``seconds`` for a key. Return whether the key was q. Any other key ends the wait, too."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and sys.stdin.read(1) in ("q", "Q", "")
