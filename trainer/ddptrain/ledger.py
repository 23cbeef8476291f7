"""Where a rank's wall time went, from the start of its process: what was training, and what it cost beside it."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ddpwire import names
from ddpwire.rank_catalogue import UNPRODUCTIVE_CAUSES


class Ledger:
    """Seconds by what they were for. ``started``: time.monotonic() of the process' start."""

    def __init__(self, started: float, *, steps_before: int = 0) -> None:
        """``steps_before``: up to this one an earlier attempt has come: they are taken again."""
        self.started = started
        self.productive_s = 0.0  # in steps that nobody had taken before
        self.lost_s = dict.fromkeys(UNPRODUCTIVE_CAUSES, 0.0)
        self._steps_before = steps_before

    def took(self, step: int, seconds: float) -> None:
        """A step was taken."""
        if step > self._steps_before:
            self.productive_s += seconds
        else:
            self.lost_s["recompute"] += seconds

    @contextlib.contextmanager
    def lost(self, cause: str) -> Iterator[None]:
        """What is done inside is no training."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.lost_s[cause] += time.monotonic() - began

    def ready(self) -> None:
        """The first step is next: all until now that was not something else was the start."""
        self.lost_s["startup"] = 0.0
        self.lost_s["startup"] = self.total_s - sum(self.lost_s.values())

    @property
    def total_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started

    @property
    def goodput(self) -> float:
        """The share of the wall time in which steps were taken for the first time, 0 to 1."""
        return self.productive_s / self.total_s


def steps_before(environ: Mapping[str, str]) -> int:
    """How far earlier attempts came, as ddprun says it."""
    text = environ.get(names.STEPS_BEFORE, "")
    return int(text) if text.isdecimal() else 0


def lost_before(environ: Mapping[str, str], *, started: float) -> dict[str, float]:
    """Seconds by cause before this process was ``started``, as ddprun says it.

    What passed since it was asked for is of its start: the keeper of the ranks may have had to import torch first.
    """
    said: dict[str, float] = {}
    for pair in environ.get(names.LOST_BEFORE, "").split(","):
        cause, _, seconds = pair.partition("=")
        with contextlib.suppress(ValueError):
            said[cause] = float(seconds)
    lost = {cause: max(0.0, seconds) for cause, seconds in said.items() if cause in UNPRODUCTIVE_CAUSES}
    if names.AT in said:
        lost["startup"] = max(0.0, started - said[names.AT])
    return lost


def process_start() -> float:
    """When this process was started, by time.monotonic(); where nobody knows (no Linux), now."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / 100  # USER_HZ is 100 to all programs (time(7))
    except (OSError, AttributeError):
        age_s = 0.0
    return time.monotonic() - age_s
