"""The verb timeline: where a launch's minutes went."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from ddpctl.commands.runs import Json, RunName
from ddpctl.words import cut, one_line, span

if TYPE_CHECKING:
    from ddpctl.watch.material import Material
    from ddpctl.watch.phases import Span

DEFAULT_WIDTH = 100
PLAIN, BLOCK = "#", "█"


def timeline(run: RunName = None, as_json: Json = False) -> None:
    """Draw where a run's minutes went.

    A bar for each phase, from the queue over rendezvous and imports to training and what was lost; below them what
    went wrong, and when.
    """
    from ddpctl import runs
    from ddpctl.desk import open_desk
    from ddpctl.watch import material
    from ddpctl.watch.phases import totals

    desk = open_desk(os.environ)
    found = material.gather(desk, runs.load(desk.root, run))
    if as_json:
        document = {
            "run": found.run.name,
            "state": found.status.state,
            "code": found.status.code,
            "seconds": totals(found.spans),
            "spans": [asdict(span) for span in found.spans],
            "events": [json.loads(event.line()) for event in found.events],
        }
        print(json.dumps(document, indent=1))
        return
    width = shutil.get_terminal_size((DEFAULT_WIDTH, 0)).columns if sys.stdout.isatty() else DEFAULT_WIDTH
    plain = not (sys.stdout.encoding or "").lower().startswith("utf")
    for line in lines(found, width, plain=plain):
        print(line)
    for said in (*found.silent, *found.torn):
        desk.say(said)


def lines(found: "Material", width: int, *, plain: bool) -> list[str]:
    """The bars, a row a phase, and below them what happened."""
    from ddpctl.watch.notable import notable, words
    from ddpctl.watch.phases import totals

    name, status = found.run.name, found.status
    ending = "" if status.code is None else f", exit code {status.code}"
    if not found.spans:
        return [f"{name}  {status.state}{ending}: {one_line(status.message)}", "its nodes left no events to draw"]
    begin, end = found.spans[0].begin, found.spans[-1].end
    shown = [f"{name}  {status.state}{ending}: {span(end - begin)} since its launch", ""]
    seconds = totals(found.spans)
    label = max(len(phase) for phase in seconds)
    room = max(10, width - label - 20)
    for phase, sum_s in seconds.items():
        bar = bars([one for one in found.spans if one.phase == phase], begin, end, room, PLAIN if plain else BLOCK)
        shown.append(f"{phase:<{label}}  {span(sum_s):>8}  {100 * sum_s / (end - begin):3.0f} %  {bar}".rstrip())
    if told := notable(found.events):
        told_at = ((f"{span(event.time - begin):>{label + 10}}", one_line(words(event))) for event in told)
        shown += ["", *(cut(f"{at}  {said}", width, plain=plain) for at, said in told_at)]
    return shown


def bars(spans: Sequence["Span"], begin: float, end: float, room: int, full: str) -> str:
    """Where in the run's time these are; each has one character at the least."""
    cells = [" "] * room
    for one in spans:
        first = min(room - 1, int((one.begin - begin) / (end - begin) * room))
        last = max(first + 1, round((one.end - begin) / (end - begin) * room))
        cells[first:last] = full * (min(last, room) - first)
    return "".join(cells).rstrip()


def register(app: typer.Typer) -> None:
    """Add this verb to the program."""
    app.command()(timeline)
