"""How long a restart takes, phase by phase, and how many steps it costs; told as metrics and in one line."""

import time
from collections.abc import Iterable

from ddprun.exporter import NodeSeries
from ddprun.journal import Journal
from ddpwire import catalogue

FIRST_STEP_S = 60.0


class Recovery:
    """A stopwatch from a failure to the first step after it."""

    def __init__(self, series: NodeSeries, journal: Journal, best: int | None) -> None:
        """``best``: the highest step of an earlier start of the run."""
        self._series = series
        self._journal = journal
        self._begins_at_first = best is not None  # what it lost is told with the first step, too
        self._failed_at = 0.0  # 0: nothing is being recovered from
        self._lap_at = 0.0
        self.best = best  # the highest step of all attempts
        self.waits_for_step = False

    def failed(self, step: int | None) -> None:
        """A rank of this node has failed after ``step``, or, where none did, the verdict is there: the first starts."""
        self._reached(step)
        if not self._failed_at or self.waits_for_step:
            self.waits_for_step = False
            self._failed_at = self._lap_at = time.monotonic()

    def end_phase(self, phase: str) -> None:
        """A phase of the catalogue is over."""
        now = time.monotonic()
        if self._failed_at:
            self._series.set(catalogue.RECOVERY, now - self._lap_at, phase=phase)
        self._lap_at = now

    def started(self) -> None:
        """The ranks are started again."""
        if self._failed_at:
            self.end_phase("start")
            self._series.set(catalogue.RECOVERY, self._lap_at - self._failed_at, phase="total")
            self.waits_for_step = True

    def steps(self, steps: Iterable[int | None]) -> None:
        """The steps of this node's ranks at this moment."""
        step = max((step for step in steps if step is not None), default=None)
        if self.waits_for_step and time.monotonic() - self._failed_at > FIRST_STEP_S:
            self.waits_for_step, self._failed_at = False, 0.0  # it does not beat
        if step is None:
            return
        if self._begins_at_first:
            self._begins_at_first = False
            self._series.count(catalogue.STEPS_LOST, self._lost(step))
        elif self.waits_for_step:
            self.waits_for_step = False
            passed_s = time.monotonic() - self._failed_at
            self._failed_at = 0.0
            self._series.set(catalogue.RECOVERY, passed_s, phase="first_step")
            lost = self._lost(step)
            self._series.count(catalogue.STEPS_LOST, lost)
            self._journal.tell("recovered", step=step, seconds=passed_s, steps_lost=lost)
            self._journal.say(f"training again at step {step}, {passed_s:.1f} s after the failure; {lost} steps lost")
        self._reached(step)

    def _reached(self, step: int | None) -> None:
        if step is not None:
            self.best = step if self.best is None else max(self.best, step)

    def _lost(self, step: int) -> int:
        """Steps that are taken again when the first is ``step``."""
        return 0 if self.best is None else max(0, self.best - step + 1)
