"""Goodput: the share of a rank's wall time that was spent on productive steps, and the time lost to each cause."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ddpwire import names
from ddpwire.metrics import UNPRODUCTIVE_CAUSES


class Goodput:
    """The productive and the lost seconds of a process. ``started`` is the value of time.monotonic() at its start."""

    def __init__(self, started: float, *, steps_before: int = 0, earlier_s: Mapping[str, float] | None = None) -> None:
        """``steps_before`` is the highest step of earlier attempts. Steps up to this number count as recomputed.

        ``earlier_s`` are the rank's seconds before this process: see ``totals_s``.
        """
        self.started = started
        self.productive_s = 0.0  # in steps that no earlier attempt has taken
        self.lost_s = dict.fromkeys(UNPRODUCTIVE_CAUSES, 0.0)
        self._steps_before, self._earlier_s = steps_before, earlier_s or {}

    def add_step(self, step: int, seconds: float) -> None:
        """Add the duration of a step."""
        if step > self._steps_before:
            self.productive_s += seconds
        else:
            self.lost_s["recompute"] += seconds

    @contextlib.contextmanager
    def time_lost(self, cause: str) -> Iterator[None]:
        """Add the duration of the ``with`` block to the seconds lost to ``cause``."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.lost_s[cause] += time.monotonic() - began

    def mark_ready(self) -> None:
        """End the start-up. All time so far that has no other cause counts as start-up."""
        self.lost_s["startup"] = 0.0
        self.lost_s["startup"] = self.total_s - sum(self.lost_s.values())

    @property
    def totals_s(self) -> dict[str, float]:
        """The rank's seconds in all of its starts, by cause of lost time, and the "productive" ones."""
        own_s = {"productive": self.productive_s, **self.lost_s}
        return {cause: seconds + self._earlier_s.get(cause, 0.0) for cause, seconds in own_s.items()}

    @property
    def total_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started


def steps_before(environ: Mapping[str, str]) -> int:
    """Return the highest step of earlier attempts, or 0 if there were none. ddprun sets it in the environment."""
    text = environ.get(names.STEPS_BEFORE, "")
    return int(text) if text.isdecimal() else 0


def lost_before(environ: Mapping[str, str], *, started: float) -> dict[str, float]:
    """Return the seconds that were lost before this process was started, keyed by cause.

    ddprun sets them in the environment. The time that ddprun needed to start this process counts as start-up.
    ``started`` is the value of time.monotonic() at the start of this process.
    """
    given = _seconds(environ.get(names.LOST_BEFORE, ""))
    lost = {cause: max(0.0, seconds) for cause, seconds in given.items() if cause in UNPRODUCTIVE_CAUSES}
    if names.AT in given:
        lost["startup"] = max(0.0, started - given[names.AT])
    return lost


def earlier_s(environ: Mapping[str, str], lost: Mapping[str, float]) -> dict[str, float]:
    """Return what the rank's earlier processes have spent, and ``lost`` since then, for a Goodput."""
    spent = _seconds(environ.get(names.SPENT_BEFORE, ""))
    return {cause: spent.get(cause, 0.0) + lost.get(cause, 0.0) for cause in ("productive", *UNPRODUCTIVE_CAUSES)}


def _seconds(text: str) -> dict[str, float]:
    seconds_of: dict[str, float] = {}
    for pair in text.split(","):
        cause, _, seconds = pair.partition("=")
        with contextlib.suppress(ValueError):
            seconds_of[cause] = float(seconds)
    return seconds_of


def process_start() -> float:
    """Return the value of time.monotonic() at the start of this process. If it is unknown, return the current value."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / 100  # USER_HZ is 100 for all programs (time(7))
    except (OSError, AttributeError):  # not Linux
        age_s = 0.0
    return time.monotonic() - age_s
