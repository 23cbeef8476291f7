"""What a failure costs: the downtime until the ranks run again, and the steps that must be trained again.

``Downtime`` is passed on to the ranks, which include it in their goodput. ``Recovery`` measures each phase of a restart
for the node's metrics. This module must not import prometheus_client, because main.py imports it before the fork.
"""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ddprank.heartbeat import Beat
from ddprun.files.node_dir import Journal
from ddpwire import metrics
from ddpwire.names import AT

if TYPE_CHECKING:
    from ddprun.metrics.metrics import NodeSeries


class Downtime:
    """The seconds since the ranks last trained, keyed by cause. All times are values of time.monotonic()."""

    def __init__(self, *, began_at: float, requeued_s: float = 0.0) -> None:
        self._lost = {"requeue": requeued_s} if requeued_s > 0 else {}
        self._since = self._started_at = began_at

    @property
    def requeued(self) -> dict[str, Any]:
        """Return ``requeued_s`` for the event ``node_started``, or an empty dict if there was no earlier start."""
        return {"requeued_s": round(self._lost["requeue"], 1)} if "requeue" in self._lost else {}

    def started(self, now: float) -> str:
        """Record that the ranks start. Return the time since they last trained, in the format of names.LOST_BEFORE."""
        lost = {**self._lost, "rendezvous": now - self._since, AT: now}
        self._lost, self._started_at = {}, now
        return ",".join(f"{cause}={seconds:.3f}" for cause, seconds in lost.items())

    def ended(self, now: float, *, hung: bool, beats: Iterable[Beat]) -> None:
        """Record that the ranks of a failed attempt have ended. ``beats`` are their last heartbeats."""
        trained_at = max((beat.at_s for beat in beats), default=self._started_at)
        self._lost = {"hang" if hung else "restart": max(0.0, now - trained_at)}
        self._since = now


class Recovery:
    """Measures each phase from a failure to the first step after it, and counts the lost steps."""

    def __init__(self, series: "NodeSeries", journal: Journal, best: int | None) -> None:
        """``best`` is the highest step that an earlier start of the run has reached."""
        self._series, self._journal = series, journal
        self._is_requeued = best is not None  # steps lost before this start are counted at the first step
        self._failed_at = self._lap_at = 0.0  # 0 while no recovery is in progress
        self.best = best  # the highest step of all attempts
        self.waits_for_step = False

    def failed(self, step: int | None) -> None:
        """Start a measurement, unless one has begun already. ``step`` is a step that the ranks have reached."""
        self.reached(step)
        if not self._failed_at or self.waits_for_step:
            self.waits_for_step = False
            self._failed_at = self._lap_at = time.monotonic()

    def end_phase(self, phase: str) -> None:
        """Record the duration of ``phase``, which must be in the metric catalogue."""
        now = time.monotonic()
        if self._failed_at:
            self._series.set(metrics.RECOVERY, now - self._lap_at, phase=phase)
        self._lap_at = now

    def started(self) -> None:
        """Record that the ranks have been started again."""
        if self._failed_at:
            self.end_phase("start")
            self._series.set(metrics.RECOVERY, self._lap_at - self._failed_at, phase="total")
            self.waits_for_step = True

    def steps(self, steps: Iterable[int | None]) -> None:
        """Note the current steps of this node's ranks. The first step after a restart ends the measurement."""
        step = max((step for step in steps if step is not None), default=None)
        if self.waits_for_step and time.monotonic() - self._failed_at > 60.0:
            self.waits_for_step, self._failed_at = False, 0.0  # the script sends no heartbeats
        if step is None:
            return
        if self._is_requeued:
            self._is_requeued = False
            self._series.count(metrics.STEPS_LOST, self._lost(step))
        elif self.waits_for_step:
            self.waits_for_step = False
            passed_s = time.monotonic() - self._failed_at
            self._failed_at = 0.0
            self._series.set(metrics.RECOVERY, passed_s, phase="first_step")
            lost = self._lost(step)
            self._series.count(metrics.STEPS_LOST, lost)
            self._journal.emit("recovered", step=step, seconds=passed_s, steps_lost=lost)
            self._journal.log(f"training again at step {step}, {passed_s:.1f} s after the failure; {lost} steps lost")
        self.reached(step)

    def reached(self, step: int | None) -> None:
        """Note a step that ranks of the run have reached, if it is the highest so far."""
        if step is not None:
            self.best = step if self.best is None else max(self.best, step)

    def _lost(self, step: int) -> int:
        return 0 if self.best is None else max(0, self.best - step + 1)
