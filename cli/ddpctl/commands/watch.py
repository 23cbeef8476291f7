"""The subcommands ``top``, ``timeline`` and ``report``. They show the ranks of a run, and how its time was spent."""

import contextlib
import json
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpctl.commands.arguments import Json, RunName, Task, find_run
from ddpctl.commands.explain import why
from ddpctl.errors import UsageError, writing
from ddpctl.job.launch_plan import title
from ddpctl.job.secrets import SHORTEST, can_be_sought, exposed_values
from ddpctl.operations import checks
from ddpctl.runs.run_status import ENDED
from ddpctl.runs.run_store import Run
from ddpctl.text import cut, format_duration, one_line
from ddpctl.watch.snapshot import Snapshot, Watcher
from ddpctl.watch.timeline import (
    Span,
    Timeline,
    describe_event,
    load_timeline,
    phase_shares,
    phase_totals,
    timeline_events,
)
from ddpwire.run_files import write_atomic

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

DEFAULT_WIDTH = 100
PLAIN, BLOCK = "#", "█"


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


def timeline(run: RunName = None, task: Task = None, as_json: Json = False) -> None:
    """Show how a run's time was spent.

    The command prints a bar for each phase, such as rendezvous, import, training and lost time. Below the bars are the
    failures and their times. Times and percentages do not include the time in a queue.
    """
    context, record = find_run(run, task)
    timeline = load_timeline(context, record)
    if as_json:
        document = {
            "run": timeline.run.name,
            "state": timeline.status.state,
            "code": timeline.status.code,
            "seconds": phase_totals(timeline.spans),
            "spans": [asdict(span) for span in timeline.spans],
            "restarts": timeline.restarts,
            "events": [json.loads(event.line()) for event in timeline.events],
        }
        print(json.dumps(document, indent=1))
        return
    width = shutil.get_terminal_size((DEFAULT_WIDTH, 0)).columns if sys.stdout.isatty() else DEFAULT_WIDTH
    plain = not (sys.stdout.encoding or "").lower().startswith("utf")
    for line in lines(timeline, width, plain=plain):
        print(line)
    if sentence := why(context, timeline.run, timeline.status):
        print(f"\nwhy: {sentence}")
    for line in (*timeline.silent, *timeline.torn):
        context.emit(line)


def lines(timeline: Timeline, width: int, *, plain: bool) -> list[str]:
    """Return a title, one line for each phase with its bar, and one line for each event."""
    name, status = timeline.run.name, timeline.status
    ending = "" if status.code is None else f", exit code {status.code}"
    if not timeline.spans:
        return [f"{name}  {status.state}{ending}: {one_line(status.message)}", "the nodes of the run wrote no events"]
    begin, end, shares = timeline.begin, timeline.end, phase_shares(timeline.spans)
    length = format_duration(end - timeline.spans[0].begin)
    since = f", {length} after its launch" if status.ended else f": {length} since its launch"
    if queued := shares.get("queue"):
        since += f", {format_duration(queued[0])} of it in the queue"
    shown = [f"{name}  {status.state}{ending}{since}", ""]
    label = max(len(phase) for phase in shares)
    columns = max(10, width - label - 20)
    for phase, (sum_s, share) in shares.items():
        bar = bars(
            [span for span in timeline.spans if span.phase == phase], begin, end, columns, PLAIN if plain else BLOCK
        )
        percent = "     " if share is None else f"{100 * share:3.0f} %"
        shown.append(f"{phase:<{label}}  {format_duration(sum_s):>8}  {percent}  {bar}".rstrip())
    if events := timeline_events(timeline.events):
        rows = (
            (f"{format_duration(event.time - begin):>{label + 10}}", one_line(describe_event(event)))
            for event in events
        )
        shown += ["", *(cut(f"{at}  {line}", width, plain=plain) for at, line in rows)]
    if "lost" in shares and "training" not in shares:
        shown += [
            "",
            "unknown: the time in which work was repeated after a failure, because no step was reported",
        ]
    return shown


def bars(spans: Sequence["Span"], begin: float, end: float, columns: int, full: str) -> str:
    """Draw spans as a line of ``columns`` characters. The line begins at the time ``begin`` and ends at ``end``.

    Spans that started before ``begin`` are left out. Each span has at least one character.
    """
    cells = [" "] * columns
    for span in spans:
        if span.begin < begin:
            continue
        first = min(columns - 1, int((span.begin - begin) / (end - begin) * columns))
        last = max(first + 1, round((span.end - begin) / (end - begin) * columns))
        cells[first:last] = full * (min(last, columns) - first)
    return "".join(cells).rstrip()


def report(
    run: RunName = None,
    task: Task = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The file to write [default: RUN.html in this folder]."),
    ] = None,
) -> None:
    """Write a report about a run as one HTML file.

    The report shows how the run ended, the last output of the rank that failed, how the time was spent, plots of loss
    and throughput, the machines and the configuration. The file needs no network and has no script. The report has
    [REDACTED] in place of the job's secrets, and in place of variables and options whose name is like token or
    password.
    """
    from ddpctl.report.html import render_page

    context, record = find_run(run, task)
    timeline = load_timeline(context, record)
    path = (output or Path(f"{record.name}.html")).absolute()
    values = {name: os.environ.get(name, "") for name in record.job.secrets}
    unsought = [name for name, value in values.items() if not can_be_sought(value)]
    results = filter(None, (checks.last_result(context, record.target, check) for check in ("bench", "doctor")))
    reason = why(context, record, timeline.status)
    sought = [*values.values(), *exposed_values(record.job)]
    text = render_page(timeline, reason=reason, values=sought, unsought=unsought, checks=results)
    with writing(path):
        write_atomic(path, text.encode(errors="replace"))
        os.umask(umask := os.umask(0o077))  # the only way to read it
        path.chmod(0o666 & ~umask)
    for line in (*timeline.silent, *timeline.torn):
        context.emit(line)
    if unsought:
        context.emit(
            f"the report may contain the secret{'s' * (len(unsought) > 1)} {', '.join(unsought)}: ddpctl cannot search "
            f"for a value that is not set here or has fewer than {SHORTEST} characters. Set the value and make the "
            "report again, or check the report before you send it"
        )
    print(path)
