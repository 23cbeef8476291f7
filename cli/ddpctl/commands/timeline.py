"""The subcommands ``timeline`` and ``report``. They show how a run's time was spent, as text or as an HTML file."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ddpctl.commands.arguments import Json, RunName, Task, find_run
from ddpctl.commands.explain import why
from ddpctl.errors import writing
from ddpctl.job.secrets import SHORTEST, can_be_sought, exposed_values
from ddpctl.operations import checks
from ddpctl.text import cut, format_duration, one_line
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

DEFAULT_WIDTH = 100
PLAIN, BLOCK = "#", "█"


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
    text = render_page(timeline, why=reason, values=sought, unsought=unsought, checks=results)
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
