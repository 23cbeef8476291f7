"""The time before ranks were started, by what it went for: told to each rank, which counts it with its own. Pure."""

from collections.abc import Iterable
from typing import Any

from ddpwire.heartbeat import Beat
from ddpwire.names import AT


class Losses:
    """Seconds since somebody last trained. All moments are time.monotonic()'s."""

    def __init__(self, *, began_at: float, requeued_s: float = 0.0) -> None:
        self._lost = {"requeue": requeued_s} if requeued_s > 0 else {}
        self._since = began_at
        self._started_at = began_at

    @property
    def requeued(self) -> dict[str, Any]:
        """What an event says of an earlier start of the run."""
        return {"requeued_s": round(self._lost["requeue"], 1)} if "requeue" in self._lost else {}

    def started(self, now: float) -> str:
        """Ranks are started: what was lost since the last ones trained, as ddpwire.names.LOST_BEFORE has it."""
        lost = {**self._lost, "rendezvous": now - self._since, AT: now}
        self._lost, self._started_at = {}, now
        return ",".join(f"{cause}={seconds:.3f}" for cause, seconds in lost.items())

    def ended(self, now: float, *, hung: bool, beats: Iterable[Beat | None]) -> None:
        """The ranks of a failed attempt are gone; ``beats``: their last signs of life."""
        trained_at = max((beat.at_s for beat in beats if beat), default=self._started_at)
        self._lost = {"hang" if hung else "restart": max(0.0, now - trained_at)}
        self._since = now
