"""Looks at a run again and again, and remembers what it saw: what ``ddpctl top`` shows is made here.

The nodes' histories are read once, at the beginning; from then on this watcher writes on them by itself. How the run
fares is asked of its target only where the nodes do not tell, and now and then: a queue's server has others to serve.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from ddpctl import launch
from ddpctl.desk import Desk
from ddpctl.errors import UnavailableError
from ddpctl.look import Look, Seen
from ddpctl.run import Run, RunStatus
from ddpctl.watch.course import Course
from ddpctl.watch.overview import Overview, nothing_told, numbers, state
from ddpctl.watch.reading import Reading, read
from ddpwire import rank_catalogue as of_ranks
from ddpwire.history import HISTORY, TIME, Row, fold, read_history

WINDOW_S = 10.0  # over which a rank's pace is taken
ASK_EVERY_S, ASK_AGAIN_S = 15.0, 3.0  # where the nodes tell, and where they do not
NUM_POINTS = 60


class Watcher:
    """One person's look at one run."""

    def __init__(self, desk: Desk, run: Run) -> None:
        self._desk, self._run = desk, run
        self._status: RunStatus | None = None
        self._asked_at = 0.0
        self._rows: dict[int, list[Row]] | None = None  # of each node; None: not read yet
        self._window: deque[tuple[float, tuple[Reading, ...]]] = deque()
        self._last: Overview | None = None

    def look(self) -> Overview:
        """The run now; where nobody answers any more, as it was seen last. Raises DdpctlError if nobody ever did."""
        try:
            self._last = self._look()
        except UnavailableError as error:  # a network has its moments: what watches goes on
            if self._last is None:
                raise
            return replace(self._last, silent=(f"no answer at present: {error}",))
        return self._last

    def _look(self) -> Overview:
        status = self._ask(again=False)
        if status.ended:
            return self._after_the_end(status)
        seen = self._see(metrics=True)
        readings = tuple(reading for one in seen if (reading := read(one)))
        if not readings:
            status = self._ask(again=True)
            if status.ended:
                return self._after_the_end(status)
        return self._overview(status, seen, readings)

    def _ask(self, *, again: bool) -> RunStatus:
        now = time.monotonic()
        if self._status is None or now - self._asked_at > (ASK_AGAIN_S if again else ASK_EVERY_S):
            (self._status,) = launch.status(self._desk, (self._run,))
            self._asked_at = now
        return self._status

    def _see(self, *, metrics: bool) -> tuple[Seen, ...]:
        files = (HISTORY,) if self._rows is None or not metrics else ()
        look = Look(metrics=metrics, files=files)
        seen = self._desk.runner.perform(launch.target_of(self._run).look(self._run, look))
        if files:
            self._rows = {one.node: list(read_history(one.files.get(HISTORY, ""))) for one in seen}
        return seen

    def _overview(self, status: RunStatus, seen: Sequence[Seen], readings: tuple[Reading, ...]) -> Overview:
        now = max((one.time for one in seen if one.time is not None), default=time.time())
        for reading in readings:
            self._keep(reading)
        before = self._before(readings)
        overview = replace(nothing_told(status, now), **numbers(readings, before))  # type: ignore[arg-type]
        overview = replace(overview, state=state(readings) or overview.state)  # fresher than what was asked for
        told = {reading.node for reading in readings}
        silent = tuple(
            f"node {one.node}: {one.failure}" for one in seen if one.node not in told and one.failure and readings
        )
        return self._with_course(replace(overview, silent=silent))

    def _after_the_end(self, status: RunStatus) -> Overview:
        self._see(metrics=False)
        course = self._course()
        planned, loss = course.last(of_ranks.STEPS_PLANNED.name), course.last(of_ranks.LOSS.name)
        step = course.last(of_ranks.LAST_STEP.name)
        productive, lost = course.total(of_ranks.PRODUCTIVE.name), _total(course, of_ranks.UNPRODUCTIVE.name)
        overview = replace(
            nothing_told(status, course.end or time.time()),
            step=None if step is None else int(step),
            planned=None if planned is None else int(planned),
            loss=loss,
            accuracy=course.last(f"{of_ranks.EVAL_ACCURACY.name}:test"),
            goodput=productive / (productive + lost) if productive else None,
        )
        return replace(self._with_course(overview), left_s=None)

    def _keep(self, reading: Reading) -> None:
        """Write on the node's history."""
        samples = ((name, labels, value) for name, said in reading.samples.items() for labels, value in said)
        assert self._rows is not None, "the histories are read with the first look"  # noqa: S101
        self._rows.setdefault(reading.node, []).append({TIME: reading.time, **fold(samples)})

    def _before(self, readings: tuple[Reading, ...]) -> tuple[Reading, ...]:
        now = time.monotonic()
        self._window.append((now, readings))
        while len(self._window) > 2 and now - self._window[1][0] >= WINDOW_S:
            self._window.popleft()
        return self._window[0][1] if len(self._window) > 1 else ()

    def _course(self) -> Course:
        return Course(nodes={node: tuple(rows) for node, rows in (self._rows or {}).items()})

    def _with_course(self, overview: Overview) -> Overview:
        course = self._course()
        moments = course.moments(NUM_POINTS)
        return replace(
            overview,
            moments=moments,
            throughput=(None, *course.rate(of_ranks.SAMPLES.name, moments)) if moments else (),
            losses=course.gauge(of_ranks.LOSS.name, moments),
            left_s=_left_s(course, overview),
        )


def _left_s(course: Course, overview: Overview) -> float | None:
    """By the pace of the run until now, with all that was no training in it."""
    first = course.first_time(of_ranks.LAST_STEP.name)
    if first is None or overview.step is None or overview.planned is None:
        return None
    passed_s, taken = overview.time - first[0], overview.step - first[1]
    if passed_s <= 0 or taken <= 0:
        return None
    return max(0, overview.planned - overview.step) * passed_s / taken


def _total(course: Course, name: str) -> float:
    names = {
        column for rows in course.nodes.values() for row in rows for column in row if column.startswith(f"{name}:")
    }
    return sum(course.total(column) for column in names)
