"""Draws a training's progress into the cell: loss, rate and throughput, as the ranks count them.

The numbers are those of the node's history, which ddprun writes while the ranks train and once more when they have
ended; ddptrain and ``ddpwire.script.progress`` feed it, and a script that counts nothing has no curve. In a notebook
one output of the cell is redrawn, which needs no widgets; elsewhere a line is printed now and then, and at the end.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddpctl.report.svg import short, ticks
from ddpwire import metrics
from ddpwire.history import HISTORY, TIME, Row, read_history

DRAW_S = 1.0
LINE_S = 15.0
MAX_POINTS = 400
RATE_POINTS = 10  # the throughput is that between so many points
WIDTH, HEIGHT = 560, 190
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 22, 36
_ACCURACY = f"{metrics.EVAL_ACCURACY.name}:test"


@dataclass(frozen=True, kw_only=True)
class Point:
    """What the ranks had counted at a moment."""

    at: float  # in seconds since the epoch
    step: int
    samples: float
    planned: int | None = None  # the last step of the training; None: not known
    loss: float | None = None  # the largest of the ranks'
    accuracy: float | None = None


class Screen(Protocol):
    """Where progress is shown."""

    def show(self, points: Sequence[Point], text: str, *, last: bool) -> None:
        """Draw the points, and print the text; ``last``: the run has ended."""


class Progress:
    """Reads a node's history now and then, and shows what is new in it."""

    def __init__(self, node_dir: Path, screen: Screen) -> None:
        self._path, self._screen = node_dir / HISTORY, screen
        self._points: list[Point] = []
        self._read_at = -math.inf

    def update(self) -> None:
        """Read and draw, if it is time."""
        if time.monotonic() - self._read_at >= DRAW_S:
            self._show(last=False)

    def close(self) -> None:
        """Draw the run's end."""
        self._show(last=True)

    def _show(self, *, last: bool) -> None:
        self._read_at = time.monotonic()
        try:
            points = points_of(read_history(self._path.read_text()))
        except (OSError, UnicodeDecodeError):  # not there yet, or being written
            points = self._points
        if points and (last or points != self._points):
            self._points = points
            self._screen.show(points, words(points), last=last)


def points_of(rows: Iterable[Row]) -> list[Point]:
    """The steps in a history; those that a later attempt took again are left out."""
    points: list[Point] = []
    for row in rows:
        if step := int(row.get(metrics.LAST_STEP.name, 0)):
            while points and points[-1].step >= step:
                points.pop()
            planned, loss = row.get(metrics.STEPS_PLANNED.name), row.get(metrics.LOSS.name)
            points.append(
                Point(
                    at=row[TIME],
                    step=step,
                    samples=row.get(metrics.SAMPLES.name, 0.0),
                    planned=int(planned) if planned else None,
                    loss=loss if loss is not None and math.isfinite(loss) else None,
                    accuracy=row.get(_ACCURACY),
                )
            )
    return points


def words(points: Sequence[Point]) -> str:
    """``step 120 of 450   loss 0.5310   1,234 samples/s   test 81.20 %``."""
    last = points[-1]
    parts = [f"step {last.step} of {last.planned}" if last.planned else f"step {last.step}"]
    if last.loss is not None:
        parts.append(f"loss {last.loss:.4f}")
    before = points[max(0, len(points) - RATE_POINTS)]
    if last.at > before.at and last.samples > before.samples:
        parts.append(f"{(last.samples - before.samples) / (last.at - before.at):,.0f} samples/s")
    if last.accuracy is not None:
        parts.append(f"test {100 * last.accuracy:.2f} %")
    return "   ".join(parts)


def curve(points: Sequence[Point]) -> str:
    """The loss over the steps, as SVG in the colours of the page; empty where no loss is known."""
    known = [(point.step, point.loss) for point in points if point.loss is not None]
    if not known:
        return ""
    # ddptrain reports a loss an epoch, which holds until the next one.
    changes = [point for before, point in zip([(0, None), *known], known, strict=False) if point[1] != before[1]]
    drawn = [*changes[:: -(-len(changes) // MAX_POINTS)], known[-1]]
    first, end = known[0][0], max(points[-1].planned or 0, points[-1].step)
    begin = 0 if first <= end / 2 else first  # a resumed training has no steps before its first
    losses = [loss for _, loss in known]
    margin = (max(losses) - min(losses)) * 0.05 or 0.5
    low, high = min(losses) - margin, max(losses) + margin

    def x(step: float) -> float:
        return LEFT + (step - begin) / max(1, end - begin) * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return HEIGHT - BOTTOM - (loss - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    right, bottom, path = WIDTH - RIGHT, HEIGHT - BOTTOM, " ".join(f"{x(s):.1f},{y(loss):.1f}" for s, loss in drawn)
    return "".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11" fill="currentColor">',
        f"<title>loss from {losses[0]:.4g} to {losses[-1]:.4g}, steps {first} to {known[-1][0]}</title>",
        *(
            f'<path d="M{LEFT} {y(tick):.1f}H{right}" stroke="currentColor" stroke-opacity="0.15"/>'
            f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{short(tick)}</text>'
            for tick in ticks(low, high)
        ),
        *(
            f'<path d="M{x(tick):.1f} {bottom}v4" stroke="currentColor"/>'
            f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:,.0f}</text>'
            for tick in ticks(begin, end)
            if tick == int(tick)
        ),
        f'<path d="M{LEFT} {TOP - 6}V{bottom}H{right}" fill="none" stroke="currentColor"/>',
        f'<text x="{LEFT}" y="{TOP - 10}" text-anchor="middle">loss</text>',
        f'<text x="{right}" y="{bottom + 31}" text-anchor="end">step</text>',
        f'<polyline points="{path}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>',
        f'<circle cx="{x(known[-1][0]):.1f}" cy="{y(losses[-1]):.1f}" r="3" fill="#1f77b4"/></svg>',
    ))  # fmt: skip


class Lines:
    """A line now and then, and at the end."""

    def __init__(self) -> None:
        self._printed = time.monotonic()

    def show(self, points: Sequence[Point], text: str, *, last: bool) -> None:
        """Print it, if the last one is long ago."""
        del points
        if last or time.monotonic() - self._printed > LINE_S:
            self._printed = time.monotonic()
            print(text, flush=True)


class Cell:
    """One output of the cell, drawn again each time: by IPython's display, which needs no widgets."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, points: Sequence[Point], text: str, *, last: bool) -> None:
        """Draw it."""
        del last
        data = {"text/plain": text, "text/html": f"{curve(points)}<pre>{text}</pre>"}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def screen() -> Screen:
    """The cell where there is one, else lines."""
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ImportError:
        return Lines()
    return Cell(display) if hasattr(get_ipython(), "kernel") else Lines()
