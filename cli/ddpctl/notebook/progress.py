"""Shows the progress of a training in the cell: steps, loss, throughput and test accuracy.

The numbers come from the history of the node, a file that ddprun writes during the training and at its end. ddptrain
reports the numbers, and other scripts can report them with ``ddpwire.script.progress``. In a notebook, one output of
the cell is updated, without widgets. Outside a notebook, a line is printed from time to time and at the end.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ddpctl.report.charts import short, ticks
from ddpctl.report.html import environment
from ddpwire import metrics
from ddpwire.history import HISTORY, TIME, Row, read_history

DRAW_S = 1.0
LINE_S = 15.0
MAX_POINTS = 400
RATE_POINTS = 10  # the throughput is measured over this many points
WIDTH, HEIGHT = 560, 190
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 22, 36
_STEP, _LOSS = metrics.LAST_STEP.name, metrics.LOSS.name


class Progress:
    """Reads the history of a node from time to time, and shows new values: in the cell, or as a line.

    ``display`` is IPython's function that shows an output in a cell. If it is None, a line is printed from time to
    time, and at the end.
    """

    def __init__(self, node_dir: Path, display: Callable[..., Any] | None) -> None:
        self._path, self._display = node_dir / HISTORY, display
        self._output: Any = None  # of the cell
        self._rows: list[Row] = []
        self._read_at, self._printed_at = -math.inf, time.monotonic()

    def update(self, *, last: bool = False) -> None:
        """Read the history and show it. Unless ``last`` is true, do this at most once in ``DRAW_S`` seconds."""
        if not last and time.monotonic() - self._read_at < DRAW_S:
            return
        self._read_at = time.monotonic()
        try:
            rows = last_attempts(read_history(self._path.read_text()))
        except (OSError, UnicodeDecodeError):  # the file does not exist yet, or is being written
            rows = self._rows
        if rows and (last or rows != self._rows):
            self._rows = rows
            self._show(last=last)

    def _show(self, *, last: bool) -> None:
        text = summary(self._rows)
        if self._display is None:
            if last or time.monotonic() - self._printed_at > LINE_S:
                self._printed_at = time.monotonic()
                print(text, flush=True)
            return
        page = environment().get_template("cell.html").render(curve=curve(self._rows), text=text)
        data = {"text/plain": text, "text/html": page}
        if self._output is None:
            self._output = self._display(data, raw=True, display_id=True)
        else:
            self._output.update(data, raw=True)


def last_attempts(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that have a step. If an attempt repeats earlier steps, only the later rows remain."""
    kept: list[Row] = []
    for row in rows:
        if step := row.get(_STEP):
            while kept and kept[-1][_STEP] >= step:
                kept.pop()
            kept.append(row)
    return kept


def summary(rows: Sequence[Row]) -> str:
    """Return a line such as ``step 120 of 450   loss 0.5310   1,234 samples/s   test 81.20 %``."""
    last, before = rows[-1], rows[max(0, len(rows) - RATE_POINTS)]
    planned = last.get(metrics.STEPS_PLANNED.name)
    parts = [f"step {last[_STEP]:.0f} of {planned:.0f}" if planned else f"step {last[_STEP]:.0f}"]
    if math.isfinite(loss := last.get(_LOSS, math.nan)):
        parts.append(f"loss {loss:.4f}")
    num_samples = last.get(metrics.SAMPLES.name, 0.0) - before.get(metrics.SAMPLES.name, 0.0)
    if last[TIME] > before[TIME] and num_samples > 0:
        parts.append(f"{num_samples / (last[TIME] - before[TIME]):,.0f} samples/s")
    if (accuracy := last.get(f"{metrics.EVAL_ACCURACY.name}:test")) is not None:
        parts.append(f"test {100 * accuracy:.2f} %")
    return "   ".join(parts)


def curve(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return the loss over the steps for cell.html, in the coordinates of its SVG, or None if no loss is known."""
    known = [(row[_STEP], row[_LOSS]) for row in rows if math.isfinite(row.get(_LOSS, math.nan))]
    if not known:
        return None
    # ddptrain reports one loss per epoch, which stays the same until the next one.
    changes = [point for before, point in zip([(0, None), *known], known, strict=False) if point[1] != before[1]]
    drawn = [*changes[:: -(-len(changes) // MAX_POINTS)], known[-1]]
    first, end = known[0][0], max(rows[-1].get(metrics.STEPS_PLANNED.name, 0.0), rows[-1][_STEP])
    begin = 0.0 if first <= end / 2 else first  # a resumed run has no values for the steps before it was resumed
    losses = [loss for _, loss in known]
    margin = (max(losses) - min(losses)) * 0.05 or 0.5
    low, high = min(losses) - margin, max(losses) + margin

    def x(step: float) -> float:
        return round(LEFT + (step - begin) / max(1, end - begin) * (WIDTH - LEFT - RIGHT), 1)

    def y(loss: float) -> float:
        return round(HEIGHT - BOTTOM - (loss - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "top": TOP,
        "bottom": HEIGHT - BOTTOM,
        "title": f"loss from {losses[0]:.4g} to {losses[-1]:.4g}, steps {first:.0f} to {known[-1][0]:.0f}",
        "losses": [(y(tick), short(tick)) for tick in ticks(low, high)],
        "steps": [(x(tick), f"{tick:,.0f}") for tick in ticks(begin, end) if tick == int(tick)],
        "points": [f"{x(step)},{y(loss)}" for step, loss in drawn],
        "last": (x(known[-1][0]), y(losses[-1])),
    }


def cell_display() -> Callable[..., Any] | None:
    """Return IPython's function that shows an output in a cell. Return None outside a notebook."""
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ImportError:
        return None
    return display if hasattr(get_ipython(), "kernel") else None
