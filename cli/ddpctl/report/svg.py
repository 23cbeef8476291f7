"""Draws plots over a run's time as inline SVG: line charts, stacked areas and a Gantt chart of phases.

When the pointer is over a plot, SVG title elements show the values.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ddpctl.text import format_duration
from ddpctl.watch.history import History
from ddpctl.watch.timeline import Span
from ddpwire import metrics as of_ranks

WIDTH, HEIGHT, ROW = 960, 220, 26
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 24
Point = tuple[float, float]  # seconds since the run's start, and a value
Place = Callable[[float], float]  # maps a time or a value to a coordinate
NUM_POINTS = 160
LEAST = 2  # the minimum number of points of a line
PHASE_WORDS = {"h2d": "to the device", "comm_exposed": "waiting for the other ranks"}

# title of the plot, series, factor, unit
_GAUGES = (
    ("Learning rate", of_ranks.LEARNING_RATE.name, 1.0, ""),
    ("GPU use", of_ranks.DEVICE_UTILIZATION.name, 100.0, " %"),
    ("GPU memory, of the rank with the most", f"{of_ranks.DEVICE_MEMORY.name}:allocated", 1 / (1 << 30), " GiB"),
)
STEPS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400)
SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a plot. ``style`` is its CSS class."""

    name: str
    style: str
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment that is marked in all plots."""

    at: float  # seconds since the run's start
    style: str
    words: str


def line_chart(
    drawn: Sequence[Line], *, seconds: float, marks: Sequence[Mark] = (), unit: str = "", from_zero: bool = True
) -> str:
    """Draw lines over time. ``seconds`` is the length of the time axis, and ``unit`` is the text after each value."""
    values = [value for line in drawn for _, value in line.points]
    high, low = max(values), min(values)
    low = min(0.0, low) if from_zero else low
    high = high if high > low else low + 1
    high += (high - low) * 0.05
    across, up = _across(seconds), _up(low, high)
    body = [_grid(low, high, up, seconds, across, unit), _marks(marks, across)]
    for line in drawn:
        path = " ".join(f"{across(at):.1f},{up(value):.1f}" for at, value in line.points)
        body.append(f'<polyline class="line {line.style}" points="{path}"/>')
        if len(line.points) == 1:
            at, value = line.points[0]
            body.append(f'<circle class="dot {line.style}" cx="{across(at):.1f}" cy="{up(value):.1f}" r="3"/>')
    body.append(_hover(drawn, across, unit))
    return _svg("".join(body), HEIGHT)


def area_chart(drawn: Sequence[Line], *, seconds: float, marks: Sequence[Mark] = ()) -> str:
    """Draw percentages over time as stacked areas. All lines must have values at the same times."""
    across, up = _across(seconds), _up(0, 100)
    moments = [at for at, _ in drawn[0].points]
    below = [0.0] * len(moments)
    body = []
    for line in drawn:
        above = [low + value for low, (_, value) in zip(below, line.points, strict=True)]
        there = [f"{across(at):.1f},{up(value):.1f}" for at, value in zip(moments, above, strict=True)]
        back = [f"{across(at):.1f},{up(value):.1f}" for at, value in zip(moments, below, strict=True)]
        body.append(f'<polygon class="area {line.style}" points="{" ".join(there + back[::-1])}"/>')
        below = above
    body += [_grid(0, 100, up, seconds, across, " %"), _marks(marks, across), _hover(drawn, across, " %")]
    return _svg("".join(body), HEIGHT)


def gantt_chart(
    spans: Sequence[Span], shares: Mapping[str, tuple[float, float | None]], *, begin: float, seconds: float
) -> str:
    """Draw a row for each phase. It shows the total duration, the share, and a bar for each span.

    The time axis starts at ``begin``. Spans that started earlier have no bar.
    """
    height = TOP + BOTTOM + ROW * len(shares)
    left, across = 200, _across(seconds, left=200)
    body = [_times(seconds, across, height)]
    for row, (phase, (total, share)) in enumerate(shares.items()):
        y = TOP + row * ROW
        text = f"{escape(phase)}  {format_duration(total)}" + ("" if share is None else f"  {100 * share:.0f} %")
        body.append(f'<text class="label" x="{left - 10}" y="{y + 17}" text-anchor="end">{text}</text>')
        for one in spans:
            if one.phase == phase and one.begin >= begin:
                x, wide = across(one.begin - begin), max(1.0, across(one.end - begin) - across(one.begin - begin))
                lasted, since = format_duration(one.seconds), format_duration(one.begin - begin)
                title = f"<title>{escape(phase)}: {lasted}, from {since} on</title>"
                style = f"bar phase-{phase.replace(' ', '-')}"
                place = f'x="{x:.1f}" y="{y + 4}" width="{wide:.1f}" height="{ROW - 8}"'
                body.append(f'<rect class="{style}" {place}>{title}</rect>')
    return _svg("".join(body), height)


def _svg(body: str, height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{body}</svg>'


def _across(seconds: float, left: int = LEFT) -> Place:
    return lambda at: left + at / seconds * (WIDTH - left - RIGHT)


def _up(low: float, high: float) -> Place:
    return lambda value: HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _grid(low: float, high: float, up: Place, seconds: float, across: Place, unit: str) -> str:
    found = []
    for tick in ticks(low, high):
        y = f"{up(tick):.1f}"
        found.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        place = f'x="{LEFT - 8}" y="{up(tick) + 4:.1f}" text-anchor="end"'
        found.append(f'<text class="tick" {place}>{short(tick)}{unit}</text>')
    return "".join(found) + _times(seconds, across, HEIGHT)


def _times(seconds: float, across: Place, height: float) -> str:
    return "".join(
        f'<line class="grid" x1="{across(at):.1f}" x2="{across(at):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'
        f'<text class="tick" x="{across(at):.1f}" y="{height - 8}" text-anchor="middle">{clock(at)}</text>'
        for at in time_ticks(seconds)
    )


def _marks(marks: Sequence[Mark], across: Place) -> str:
    return "".join(
        f'<line class="mark {mark.style}" x1="{across(mark.at):.1f}" x2="{across(mark.at):.1f}" '
        f'y1="{TOP}" y2="{HEIGHT - BOTTOM}"><title>{format_duration(mark.at)}: {escape(mark.words)}</title></line>'
        for mark in marks
    )


def _hover(drawn: Sequence[Line], across: Place, unit: str) -> str:
    """Return an invisible rectangle for each time. Its title shows the values of all lines at that time."""
    known = [(line.name, dict(line.points)) for line in drawn]
    at_all = sorted({at for _, points in known for at in points})
    found = []
    for index, at in enumerate(at_all):
        before = (at_all[index - 1] + at) / 2 if index else at
        after = (at + at_all[index + 1]) / 2 if index + 1 < len(at_all) else at
        shown = [f"{name} {short(points[at])}{unit}" for name, points in known if at in points]
        x, wide = across(before), max(2.0, across(after) - across(before))
        found.append(
            f'<rect class="hover" x="{x:.1f}" y="{TOP}" width="{wide:.1f}" height="{HEIGHT - TOP - BOTTOM}">'
            f"<title>{format_duration(at)}: {escape(', '.join(shown))}</title></rect>"
        )
    return "".join(found)


def history_plots(
    history: History, *, begin: float, seconds: float, marks: Sequence[Mark]
) -> list[tuple[str, str, str]]:
    """Return the title, SVG and legend of each plot that has values. ``begin`` is the start of the time axis."""
    moments = history.moments(NUM_POINTS)
    if not moments or seconds <= 0:
        return []
    found: list[tuple[str, str, str]] = []

    def add(title: str, points: Sequence[Point], *, unit: str = "", from_zero: bool = True) -> None:
        if len(points) >= LEAST:
            line = Line(name=title.partition(",")[0], style="", points=points)
            chart = line_chart([line], seconds=seconds, marks=marks, unit=unit, from_zero=from_zero)
            found.append((title, chart, ""))

    def gauge(name: str, factor: float = 1.0) -> list[Point]:
        points = _points(moments, history.gauge(name, moments), begin)
        return [(at, value * factor) for at, value in points]

    losses = _changes(gauge(of_ranks.LOSS.name))
    values = [value for _, value in losses] or [0.0]
    add("Loss", losses, from_zero=min(values) < max(values) / 2)  # far from zero, changes would be hard to see
    rate = _points(moments[1:], history.rate(of_ranks.SAMPLES.name, moments), begin)
    add("Throughput, samples per second", rate if any(value for _, value in rate) else ())
    if shares := _shares(history, moments, begin):
        found.append(("Where the time of a step goes", area_chart(shares, seconds=seconds, marks=marks), _key(shares)))
    add("Test accuracy", _changes(gauge(f"{of_ranks.EVAL_ACCURACY.name}:test", 100.0)), unit=" %", from_zero=False)
    for title, name, factor, unit in _GAUGES:
        add(title, gauge(name, factor), unit=unit)
    return found


def _points(moments: Sequence[float], values: Sequence[float | None], begin: float) -> list[Point]:
    pairs = zip(moments, values, strict=True)
    return [(max(0.0, at - begin), value) for at, value in pairs if value is not None]


def _changes(points: Sequence[Point]) -> list[Point]:
    """Return the points at which the value changes, and the last point. Other points only repeat an epoch's value."""
    found = [point for index, point in enumerate(points) if not index or point[1] != points[index - 1][1]]
    return [*found, points[-1]] if len(found) > 1 and found[-1] != points[-1] else found


def _shares(history: History, moments: Sequence[float], begin: float) -> list[Line]:
    """Return the share of each phase in the step time, in percent. Moments without a step are left out."""
    name = of_ranks.STEP_PHASE.name
    rates = {phase: history.rate(f"{name}:{phase}", moments) for phase in of_ranks.STEP_PHASES}
    sums = [sum(values[index] or 0.0 for values in rates.values()) for index in range(len(moments) - 1)]
    there = [index for index, whole in enumerate(sums) if whole > 0]
    if len(there) < LEAST:
        return []
    return [
        Line(
            name=PHASE_WORDS.get(phase, phase),
            style=phase,
            points=[
                (max(0.0, moments[index + 1] - begin), 100 * (values[index] or 0.0) / sums[index]) for index in there
            ],
        )
        for phase, values in rates.items()
        if any(values[index] for index in there)
    ]


def _key(drawn: Sequence[Line]) -> str:
    items = "".join(f'<i class="{line.style}"></i>{line.name}' for line in drawn)
    return f'<p class="key">{items}</p>'


def ticks(low: float, high: float, number: int = 5) -> list[float]:
    """Return about ``number`` evenly spaced, round values from ``low`` to ``high``."""
    if not high > low:
        return [low]
    rough = (high - low) / number
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * size for size in (1, 2, 2.5, 5, 10) if power * size >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def time_ticks(seconds: float, number: int = 8) -> list[float]:
    """Return round times from 0 to ``seconds``, with at most ``number`` intervals."""
    step = next((step for step in STEPS_S if step * number >= seconds), 86400.0 * math.ceil(seconds / 86400 / number))
    return [index * step for index in range(int(seconds / step + 1e-9) + 1)]


def clock(seconds: float) -> str:
    """Format a time for an axis, such as 0.2 s, 45 s or 3:00."""
    return f"{seconds:.3g} s" if seconds < 120 else format_duration(seconds)


def short(value: float) -> str:
    """Format a number with at most four digits, such as 1.25 k."""
    for size, suffix in SUFFIXES:
        if abs(value) >= size:
            return f"{value / size:.4g} {suffix}"
    return f"{value:.4g}"
