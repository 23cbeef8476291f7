"""The moment at which a run is ended from outside, and the stop that comes in time before it.

Who ends a run kills it: Slurm at its time limit, Kubernetes at activeDeadlineSeconds, Kaggle after 12 hours, without
asking the ranks. So they are asked here, by a SIGTERM that leaves them their grace.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from ddprun.errors import bad_contract
from ddpwire import kaggle, names

MARGIN_S = 5.0  # from the last rank's end to ddprun's own
SLURM_MARGIN_S = 30.0  # its batch script may have to requeue the job after ddprun has ended
SLURM_END_TIME = "SLURM_JOB_END_TIME"


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """When all must be over: ``at`` (seconds since the epoch), or ``after_s`` ddprun's start."""

    source: str  # who said so
    at: float | None = None
    after_s: float = 0.0
    margin_s: float = MARGIN_S

    def seconds_left(self, *, started: float, now: float) -> float:
        """Until then."""
        return (started + self.after_s if self.at is None else self.at) - now


def read(flag: str | None, environ: Mapping[str, str], *, grace_s: float, now: float) -> Deadline | None:
    """The deadline of this node; None: there is none. ``now``: seconds since the epoch. Raises NodeError."""
    for source, text in (("--deadline", flag), (names.DEADLINE, environ.get(names.DEADLINE))):
        if text:
            return _given(source, text, grace_s, now)
    end = environ.get(SLURM_END_TIME)
    if end and end.isdecimal():
        return Deadline(source=SLURM_END_TIME, at=float(end), margin_s=SLURM_MARGIN_S)
    ends = kaggle.ends_at(environ, started=kaggle.container_start()) if kaggle.session(environ) else None
    return None if ends is None else Deadline(source="the Kaggle session's end", at=ends, margin_s=kaggle.MARGIN_S)


def _given(source: str, text: str, grace_s: float, now: float) -> Deadline:
    at: float | None = None
    try:
        after_s = float(text)
    except ValueError:
        try:
            at = datetime.fromisoformat(text).timestamp()
            after_s = at - now
        except (ValueError, OverflowError):
            after_s = -1.0
    if at is not None and after_s <= 0:
        raise bad_contract(f"{source} is {text!r}, which is over: give a time to come")
    if not 0 <= after_s < float("inf"):
        raise bad_contract(
            f"{source} is {text!r}: seconds from the start, or a time as 2030-01-31T08:00:00+00:00, is allowed"
        )
    if after_s <= grace_s + MARGIN_S:
        raise bad_contract(
            f"{source} is {text}, but ranks get {grace_s:g} s to save, and ddprun needs {MARGIN_S:g} s more: "
            f"give more than {grace_s + MARGIN_S:g}{' s from now' if at is not None else ''}, or a shorter --grace"
        )
    return Deadline(source=source, after_s=after_s) if at is None else Deadline(source=source, at=at)


def watch(
    deadline: Deadline, *, started: float, grace_s: float, ask: Callable[[], None], say: Callable[[str], None]
) -> None:
    """Ask for a stop, from a thread, so that the grace and the margin end with the deadline; once."""

    def expire() -> None:
        left_s = max(0, math.ceil(deadline.seconds_left(started=started, now=time.time())))
        say(f"the deadline ({deadline.source}) is in {left_s} s: the ranks are asked to save and stop")
        ask()

    left_s = deadline.seconds_left(started=started, now=time.time())
    wait_s = left_s - grace_s - deadline.margin_s
    timer = threading.Timer(min(max(0.0, wait_s), threading.TIMEOUT_MAX), expire)
    timer.daemon = True
    timer.start()
