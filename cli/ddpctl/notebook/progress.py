"""Shows the progress of a training in the cell: steps, loss, throughput and test accuracy.

The numbers come from the history of the node, a file that ddprun writes during the training and at its end. ddptrain
reports the numbers, and other scripts can report them with ``ddpwire.script.progress``. In a notebook, one output of
the cell is updated, without widgets. Outside a notebook, a line is printed from time to time and at the end.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpctl.report.charts import short, ticks
from ddpwire import metrics
from ddpwire.history import HISTORY, TIME, Row, read_history

DRAW_S = 1.0
LINE_S = 15.0
MAX_POINTS = 400
RATE_POINTS = 10  # the throughput is measured over this many points
WIDTH, HEIGHT = 560, 190
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 22, 36
_ACCURACY = f"{metrics.EVAL_ACCURACY.name}:test"


@dataclass(frozen=True, kw_only=True)
class Point:
    """The newest values that the ranks had reported by the time ``at``."""

    at: float  # in seconds since the epoch
    step: int
    samples: float
    planned: int | None = None  # the last step of the training, or None if it is not known
    loss: float | None = None  # the largest of the ranks' losses
    accuracy: float | None = None


class Progress:
    """Reads the history of a node from time to time, and shows new values."""

    def __init__(self, node_dir: Path, screen: "Lines | Cell") -> None:
        self._path, self._screen = node_dir / HISTORY, screen
        self._points: list[Point] = []
        self._read_at = -math.inf

    def update(self, *, last: bool = False) -> None:
        """Read the history and show it. Unless ``last`` is true, do this at most once in ``DRAW_S`` seconds."""
        if not last and time.monotonic() - self._read_at < DRAW_S:
            return
        self._read_at = time.monotonic()
        try:
            points = points_of(read_history(self._path.read_text()))
        except (OSError, UnicodeDecodeError):  # the file does not exist yet, or is being written
            points = self._points
        if points and (last or points != self._points):
            self._points = points
            self._screen.show(points, words(points), last=last)


def points_of(rows: Iterable[Row]) -> list[Point]:
    """Return the points of a history. If an attempt repeats earlier steps, only the later points remain."""
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
    """Return a line such as ``step 120 of 450   loss 0.5310   1,234 samples/s   test 81.20 %``."""
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
    """Draw the loss over the steps as SVG, in the colors of the page. Return an empty string if no loss is known."""
    known = [(point.step, point.loss) for point in points if point.loss is not None]
    if not known:
        return ""
    # ddptrain reports one loss per epoch, which stays the same until the next one.
    changes = [point for before, point in zip([(0, None), *known], known, strict=False) if point[1] != before[1]]
    drawn = [*changes[:: -(-len(changes) // MAX_POINTS)], known[-1]]
    first, end = known[0][0], max(points[-1].planned or 0, points[-1].step)
    begin = 0 if first <= end / 2 else first  # a resumed run has no values for the steps before it was resumed
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
    """Prints a line from time to time, and at the end."""

    def __init__(self) -> None:
        self._printed = time.monotonic()

    def show(self, points: Sequence[Point], text: str, *, last: bool) -> None:
        """Print the text if ``last`` is true, or if the previous line was printed more than ``LINE_S`` ago."""
        del points
        if last or time.monotonic() - self._printed > LINE_S:
            self._printed = time.monotonic()
            print(text, flush=True)


class Cell:
    """Updates one output of the cell with IPython's display function."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, points: Sequence[Point], text: str, *, last: bool) -> None:
        """Show the curve and the text."""
        del last
        data = {"text/plain": text, "text/html": f"{curve(points)}<pre>{text}</pre>"}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def screen() -> Lines | Cell:
    """Return a Cell in a notebook, or Lines elsewhere."""
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ImportError:
        return Lines()
    return Cell(display) if hasattr(get_ipython(), "kernel") else Lines()
