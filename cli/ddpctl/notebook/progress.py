"""Draws a training's progress into the cell: loss, rate and throughput, as the ranks count them.

The numbers are the node's own metrics, which ddptrain and ``ddpwire.script.progress`` feed; a script that counts
nothing has no curve. In a notebook one output of the cell is redrawn, which needs no widgets; elsewhere a line is
printed now and then.
"""

import json
import time
import urllib.request
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

DRAW_S = 1.0
LINE_S = 15.0
TIMEOUT_S = 1.0
MAX_POINTS = 400
WIDTH, HEIGHT = 480, 90


@dataclass(frozen=True, kw_only=True)
class Point:
    """What the ranks had counted at a moment."""

    at: float
    step: int
    samples: float
    loss: float | None = None
    accuracy: float | None = None


class Screen(Protocol):
    """Where progress is shown."""

    def show(self, points: "Iterable[Point]", text: str) -> None:
        """Draw the points, and say the text."""


class Progress:
    """Asks the node for its metrics now and then."""

    def __init__(self, node_file: Path, screen: Screen) -> None:
        self._node_file, self._screen = node_file, screen
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)
        self._asked = 0.0
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is this machine

    def update(self) -> None:
        """Ask and draw, if it is time."""
        if time.monotonic() - self._asked < DRAW_S:
            return
        self._asked = time.monotonic()
        point = self._ask()
        if point is None or (self._points and self._points[-1].step == point.step):
            return
        self._points.append(point)
        self._screen.show(self._points, words(self._points))

    def close(self) -> None:
        """Draw what is known for the last time."""
        if self._points:
            self._screen.show(self._points, words(self._points))

    def _ask(self) -> Point | None:
        try:
            url = json.loads(self._node_file.read_text())["metrics"]
            if not url:
                return None
            with self._opener.open(url, timeout=TIMEOUT_S) as answer:
                return read(answer.read().decode(), time.monotonic())
        except (OSError, ValueError, KeyError):  # not up yet, or gone already
            return None


def read(text: str, now: float) -> Point | None:
    """The point in a node's metrics; None: no step was counted yet."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "rank" in sample.labels or sample.name.startswith("ddp_eval"):
                values.setdefault(sample.name, []).append(sample.value)
    step = int(max(values.get("ddp_last_step", [0])))
    if step == 0:
        return None
    return Point(
        at=now,
        step=step,
        samples=sum(values.get("ddp_samples_total", [])),
        loss=next(iter(values.get("ddp_loss", [])), None),
        accuracy=next(iter(values.get("ddp_eval_accuracy_ratio", [])), None),
    )


def words(points: "deque[Point]") -> str:
    """``step 120   loss 0.5310   1,234 samples/s   test 81.20 %``."""
    last = points[-1]
    parts = [f"step {last.step}"]
    if last.loss is not None:
        parts.append(f"loss {last.loss:.4f}")
    before = points[max(0, len(points) - 10)]
    if last.at > before.at and last.samples > before.samples:
        parts.append(f"{(last.samples - before.samples) / (last.at - before.at):,.0f} samples/s")
    if last.accuracy is not None:
        parts.append(f"test {100 * last.accuracy:.2f} %")
    return "   ".join(parts)


def curve(points: Iterable[Point]) -> str:
    """The loss over the steps, as SVG; empty with fewer than two."""
    known = [(point.step, point.loss) for point in points if point.loss is not None]
    if len(known) < 2:
        return ""
    (first, _), (last, _) = known[0], known[-1]
    low, high = min(loss for _, loss in known), max(loss for _, loss in known)
    across, up = WIDTH / max(1, last - first), (HEIGHT - 4) / ((high - low) or 1.0)
    path = " ".join(f"{(step - first) * across:.1f},{HEIGHT - 2 - (loss - low) * up:.1f}" for step, loss in known)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f"<title>loss from {high:.4g} to {low:.4g}, steps {first} to {last}</title>"
        f'<polyline points="{path}" fill="none" stroke="#1f77b4" stroke-width="1.5"/></svg>'
    )


class Lines:
    """A line now and then."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def show(self, points: Iterable[Point], text: str) -> None:
        """Say it, if the last one is long ago."""
        del points
        if time.monotonic() - self._said > LINE_S:
            self._said = time.monotonic()
            print(text, flush=True)


class Cell:
    """One output of the cell, drawn anew each time: by IPython's display, which needs no widgets."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, points: Iterable[Point], text: str) -> None:
        """Draw it."""
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
