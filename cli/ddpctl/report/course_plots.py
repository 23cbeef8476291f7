"""The plots of a report: which series of a run's course are drawn, and how. Pure; what nobody told is left out."""

from collections.abc import Sequence

from ddpctl.report.plot import Line, Mark, Point, areas, lines
from ddpctl.watch.course import Course
from ddpwire import catalogue
from ddpwire import rank_catalogue as of_ranks

NUM_POINTS = 160
LEAST = 2  # points of a line
PHASE_WORDS = {"h2d": "to the device", "comm_exposed": "waiting for the other ranks"}
ONCE_AN_EPOCH = (of_ranks.LOSS.name, f"{of_ranks.EVAL_ACCURACY.name}:test")
# title, series, factor, unit, whether its axis begins at 0
_GAUGES = (
    ("Test accuracy", f"{of_ranks.EVAL_ACCURACY.name}:test", 100.0, " %", False),
    ("Learning rate", of_ranks.LEARNING_RATE.name, 1.0, "", True),
    ("GPU use", catalogue.DEVICE_UTILIZATION.name, 100.0, " %", True),
    ("GPU memory, of the rank with the most", f"{of_ranks.DEVICE_MEMORY.name}:allocated", 1 / (1 << 30), " GiB", True),
)  # fmt: skip


def plots(course: Course, *, begin: float, seconds: float, marks: Sequence[Mark]) -> list[tuple[str, str, str]]:
    """Title, picture and key of each plot. ``begin``: of the run, which was ``seconds`` long."""
    moments = course.moments(NUM_POINTS)
    if not moments or seconds <= 0:
        return []
    loss = _changes(_points(moments, course.gauge(of_ranks.LOSS.name, moments), begin))
    rate = _points(moments[1:], course.rate(of_ranks.SAMPLES.name, moments), begin)
    found = []
    if len(loss) >= LEAST:
        drawn = [Line(name="loss", style="loss", points=loss)]
        found.append(("Loss", lines(drawn, seconds=seconds, marks=marks), ""))
    if len(rate) >= LEAST and any(value for _, value in rate):
        drawn = [Line(name="throughput", style="rate", points=rate)]
        found.append(("Throughput, samples a second", lines(drawn, seconds=seconds, marks=marks), ""))
    if shares := _shares(course, moments, begin):
        found.append(("Where the time of a step goes", areas(shares, seconds=seconds, marks=marks), _key(shares)))
    for title, name, factor, unit, from_zero in _GAUGES:
        points = [(at, value * factor) for at, value in _points(moments, course.gauge(name, moments), begin)]
        points = _changes(points) if name in ONCE_AN_EPOCH else points
        if len(points) >= LEAST:
            drawn = [Line(name=title, style="gauge", points=points)]
            found.append((title, lines(drawn, seconds=seconds, marks=marks, unit=unit, from_zero=from_zero), ""))
    return found


def _points(moments: Sequence[float], values: Sequence[float | None], begin: float) -> list[Point]:
    return [
        (max(0.0, at - begin), value) for at, value in zip(moments, values, strict=True) if value is not None
    ]  # fmt: skip


def _changes(points: Sequence[Point]) -> list[Point]:
    """Where the value is another than before: it is told now and then, and holds until it is told again."""
    found = [point for index, point in enumerate(points) if not index or point[1] != points[index - 1][1]]
    return [*found, points[-1]] if len(found) > 1 and found[-1] != points[-1] else found


def _shares(course: Course, moments: Sequence[float], begin: float) -> list[Line]:
    """Each phase's share of the time that the ranks were in steps, in percent, where they were in any."""
    rates = {
        phase: course.rate(f"{of_ranks.STEP_PHASE.name}:{phase}", moments) for phase in of_ranks.STEP_PHASES
    }  # fmt: skip
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
    return f'<p class="key">{"".join(f"<i class={chr(34)}{line.style}{chr(34)}></i>{line.name}" for line in drawn)}</p>'
