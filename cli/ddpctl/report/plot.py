"""Plots over a run's time as inline SVG: lines, areas that fill the height, bars of phases. Pure.

Whoever rests the pointer on a plot is told its values there, by SVG's own titles.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ddpctl.report.scale import clock, short, ticks, time_ticks
from ddpctl.watch.phases import Span
from ddpctl.words import span

WIDTH, HEIGHT, ROW = 960, 220, 26
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 24
Point = tuple[float, float]  # seconds since the launch, value
Place = Callable[[float], float]  # a value's place in the picture


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a plot. ``style``: its class in the style sheet."""

    name: str
    style: str
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment that all plots show."""

    at: float  # seconds since the launch
    style: str
    words: str


def lines(
    drawn: Sequence[Line], *, seconds: float, marks: Sequence[Mark] = (), unit: str = "", from_zero: bool = True
) -> str:
    """Lines over time; ``unit``: what is said after a value."""
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


def areas(drawn: Sequence[Line], *, seconds: float, marks: Sequence[Mark] = ()) -> str:
    """Shares over time, one on the other; all lines have the same moments."""
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


def gantt(spans: Sequence[Span], totals: Mapping[str, float], *, begin: float, seconds: float) -> str:
    """A row a phase, with bars where the run was in it."""
    height = TOP + BOTTOM + ROW * len(totals)
    left, across = 200, _across(seconds, left=200)
    body = [_times(seconds, across, height)]
    for row, (phase, total) in enumerate(totals.items()):
        y = TOP + row * ROW
        text = f"{escape(phase)}  {span(total)}  {100 * total / seconds:.0f} %"
        body.append(f'<text class="label" x="{left - 10}" y="{y + 17}" text-anchor="end">{text}</text>')
        for one in spans:
            if one.phase == phase:
                x, wide = across(one.begin - begin), max(1.0, across(one.end - begin) - across(one.begin - begin))
                title = f"<title>{escape(phase)}: {span(one.seconds)}, from {span(one.begin - begin)} on</title>"
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
        f'y1="{TOP}" y2="{HEIGHT - BOTTOM}"><title>{span(mark.at)}: {escape(mark.words)}</title></line>'
        for mark in marks
    )


def _hover(drawn: Sequence[Line], across: Place, unit: str) -> str:
    """Strips that nobody sees, each with what the lines are there."""
    known = [(line.name, dict(line.points)) for line in drawn]
    at_all = sorted({at for _, points in known for at in points})
    found = []
    for index, at in enumerate(at_all):
        before = (at_all[index - 1] + at) / 2 if index else at
        after = (at + at_all[index + 1]) / 2 if index + 1 < len(at_all) else at
        said = [f"{name} {short(points[at])}{unit}" for name, points in known if at in points]
        x, wide = across(before), max(2.0, across(after) - across(before))
        found.append(
            f'<rect class="hover" x="{x:.1f}" y="{TOP}" width="{wide:.1f}" height="{HEIGHT - TOP - BOTTOM}">'
            f"<title>{span(at)}: {escape(', '.join(said))}</title></rect>"
        )
    return "".join(found)
