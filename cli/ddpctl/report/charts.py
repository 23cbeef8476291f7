"""Computes plots over a run's time: line charts, stacked areas and a Gantt chart of phases. report.html draws them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpctl.text import format_duration
from ddpctl.watch.history import History
from ddpctl.watch.timeline import Span
from ddpwire import metrics as of_ranks

WIDTH, HEIGHT, ROW = 960, 220, 26
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 24
LEFT_OF_BARS = 200
Point = tuple[float, float]  # seconds since the run's start, and a value
Scale = Callable[[float], float]  # maps a time or a value to a coordinate
NUM_POINTS = 160
MIN_POINTS = 2  # of a line
PHASE_NAMES = {"h2d": "to the device", "comm_exposed": "waiting for the other ranks"}

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
    text: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What an SVG shows, in its coordinates. The title of an element is shown when the pointer is over it."""

    title: str
    times: Sequence[tuple[float, str]]  # x, label
    height: float = HEIGHT
    values: Sequence[tuple[float, str]] = ()  # y, label
    areas: Sequence[tuple[str, str]] = ()  # style, points
    lines: Sequence[tuple[str, str]] = ()  # style, points
    dots: Sequence[tuple[str, float, float]] = ()  # style, x, y
    marks: Sequence[tuple[str, float, str]] = ()  # style, x, title
    hovers: Sequence[tuple[float, float, str]] = ()  # x, width, title
    labels: Sequence[tuple[float, str]] = ()  # y, text
    bars: Sequence[tuple[str, float, float, float, str]] = ()  # style, x, y, width, title
    legend: Sequence[tuple[str, str]] = ()  # style, name
    left: float = field(default=LEFT, init=False)
    right: float = field(default=WIDTH - RIGHT, init=False)
    top: float = field(default=TOP, init=False)

    @property
    def bottom(self) -> float:
        """The lower end of the plotted area."""
        return self.height - BOTTOM


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    seconds: float,
    marks: Sequence[Mark] = (),
    unit: str = "",
    from_zero: bool = True,
    stacked: bool = False,
) -> Chart:
    """Return a chart of lines over time. ``seconds`` is the length of the time axis.

    ``unit`` is the text after each value. If ``stacked``, the lines are percentages at the same times, which are
    drawn as areas on top of each other.
    """
    known = [value for line in lines for _, value in line.points]
    low = min(0.0, *known) if from_zero else min(known)
    high = max(known) if max(known) > low else low + 1
    low, high = (0.0, 100.0) if stacked else (low, high + (high - low) * 0.05)
    across = _across(seconds)

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def path(points: Sequence[Point]) -> str:
        return " ".join(f"{across(at):.1f},{up(value):.1f}" for at, value in points)

    areas = []
    below = [(at, 0.0) for at, _ in lines[0].points]
    for line in lines if stacked else ():
        above = [(at, base + value) for (at, base), (_, value) in zip(below, line.points, strict=True)]
        areas.append((line.style, path([*above, *below[::-1]])))
        below = above
    return Chart(
        title=title,
        times=[(round(across(at), 1), clock(at)) for at in time_ticks(seconds)],
        values=[(round(up(tick), 1), f"{short(tick)}{unit}") for tick in ticks(low, high)],
        areas=areas,
        lines=[] if stacked else [(line.style, path(line.points)) for line in lines],
        dots=[
            (line.style, round(across(at), 1), round(up(value), 1))
            for line in lines
            if len(line.points) == 1
            for at, value in line.points
        ],
        marks=[(mark.style, round(across(mark.at), 1), f"{format_duration(mark.at)}: {mark.text}") for mark in marks],
        hovers=_hovers(lines, across, unit),
        legend=[(line.style, line.name) for line in lines] if stacked else [],
    )


def gantt_chart(
    spans: Sequence[Span], shares: Mapping[str, tuple[float, float | None]], *, begin: float, seconds: float
) -> Chart:
    """Return a chart with a row for each phase: its total duration, its share, and a bar for each span.

    The time axis starts at ``begin``. Spans that started earlier have no bar.
    """
    across = _across(seconds, margin=LEFT_OF_BARS)
    labels, bars = [], []
    for row, (phase, (total, share)) in enumerate(shares.items()):
        y = TOP + row * ROW
        labels.append(
            (y + 17, f"{phase}  {format_duration(total)}" + ("" if share is None else f"  {100 * share:.0f} %"))
        )
        for span in spans:
            if span.phase == phase and span.begin >= begin:
                x = across(span.begin - begin)
                width = max(1.0, across(span.end - begin) - x)
                lasting, since = format_duration(span.end - span.begin), format_duration(span.begin - begin)
                title = f"{phase}: {lasting}, from {since} on"
                bars.append((phase.replace(" ", "-"), round(x, 1), y + 4, round(width, 1), title))
    times = [(round(across(at), 1), clock(at)) for at in time_ticks(seconds)]
    return Chart(title="", times=times, height=TOP + BOTTOM + ROW * len(shares), labels=labels, bars=bars)


def _across(seconds: float, margin: int = LEFT) -> Scale:
    return lambda at: margin + at / seconds * (WIDTH - margin - RIGHT)


def _hovers(lines: Sequence[Line], across: Scale, unit: str) -> list[tuple[float, float, str]]:
    """Return an invisible rectangle for each time. Its title shows the values of all lines at that time."""
    points_of = [(line.name, dict(line.points)) for line in lines]
    times = sorted({at for _, points in points_of for at in points})
    hovers = []
    for before, at, after in zip([times[0], *times], times, [*times[1:], times[-1]], strict=False):
        begin, end = across((before + at) / 2), across((at + after) / 2)
        values = ", ".join(f"{name} {short(points[at])}{unit}" for name, points in points_of if at in points)
        hovers.append((round(begin, 1), round(max(2.0, end - begin), 1), f"{format_duration(at)}: {values}"))
    return hovers


def history_charts(history: History, *, begin: float, seconds: float, marks: Sequence[Mark]) -> list[Chart]:
    """Return a chart of each metric that has values. ``begin`` is the start of the time axis."""
    moments = history.moments(NUM_POINTS)
    if not moments or seconds <= 0:
        return []
    charts: list[Chart] = []

    def add(title: str, points: Sequence[Point], *, unit: str = "", from_zero: bool = True) -> None:
        if len(points) >= MIN_POINTS:
            line = Line(name=title.partition(",")[0], style="", points=points)
            charts.append(line_chart(title, [line], seconds=seconds, marks=marks, unit=unit, from_zero=from_zero))

    def gauge(name: str, factor: float = 1.0) -> list[Point]:
        points = _points(moments, history.gauge(name, moments), begin)
        return [(at, value * factor) for at, value in points]

    losses = _changes(gauge(of_ranks.LOSS.name))
    values = [value for _, value in losses] or [0.0]
    add("Loss", losses, from_zero=min(values) < max(values) / 2)  # far from zero, changes would be hard to see
    rate = _points(moments[1:], history.rate(of_ranks.SAMPLES.name, moments), begin)
    add("Throughput, samples per second", rate if any(value for _, value in rate) else ())
    if shares := _shares(history, moments, begin):
        title = "Where the time of a step goes"
        charts.append(line_chart(title, shares, seconds=seconds, marks=marks, unit=" %", stacked=True))
    add("Test accuracy", _changes(gauge(f"{of_ranks.EVAL_ACCURACY.name}:test", 100.0)), unit=" %", from_zero=False)
    for title, name, factor, unit in _GAUGES:
        add(title, gauge(name, factor), unit=unit)
    return charts


def _points(moments: Sequence[float], values: Sequence[float | None], begin: float) -> list[Point]:
    pairs = zip(moments, values, strict=True)
    return [(max(0.0, at - begin), value) for at, value in pairs if value is not None]


def _changes(points: Sequence[Point]) -> list[Point]:
    """Return the points at which the value changes, and the last point. Other points only repeat an epoch's value."""
    changes = [point for index, point in enumerate(points) if not index or point[1] != points[index - 1][1]]
    return [*changes, points[-1]] if len(changes) > 1 and changes[-1] != points[-1] else changes


def _shares(history: History, moments: Sequence[float], begin: float) -> list[Line]:
    """Return the share of each phase in the step time, in percent. Moments without a step are left out."""
    name = of_ranks.STEP_PHASE.name
    rates = {phase: history.rate(f"{name}:{phase}", moments) for phase in of_ranks.STEP_PHASES}
    sums = [sum(values[index] or 0.0 for values in rates.values()) for index in range(len(moments) - 1)]
    stepping = [index for index, whole in enumerate(sums) if whole > 0]
    if len(stepping) < MIN_POINTS:
        return []
    return [
        Line(
            name=PHASE_NAMES.get(phase, phase),
            style=phase,
            points=[
                (max(0.0, moments[index + 1] - begin), 100 * (values[index] or 0.0) / sums[index]) for index in stepping
            ],
        )
        for phase, values in rates.items()
        if any(values[index] for index in stepping)
    ]


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
