"""Whether a run goes on after an attempt that failed. Pure; node 0 asks it, and all nodes do as it says.

Restarts are not counted but judged: what befalls a run from without may come again and again, as long as the training
moves in between. Progress is a higher step in any rank's heartbeat than in all attempts before; a script that never
beats has made progress when its ranks lived for a while.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddprun.verdict import may_restart
from ddpwire.exits import Exit
from ddpwire.outcome import Outcome

IN_VAIN = 3  # attempts without progress, after which a run gives up
LIVED_S = 60.0  # what counts as progress of a script that never beats
MAX_OOM = 1  # restarts after a rank was killed for memory: it may have been a neighbour's fault, once


@dataclass(frozen=True, kw_only=True)
class Ended:
    """An attempt that failed."""

    outcome: Outcome
    step: int | None  # the highest that any rank's heartbeat told; None: none has beaten
    lived_s: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How an attempt ended, and whether there is another."""

    outcome: Outcome
    restart: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For the store."""
        return asdict(self)


def judge(attempts: Sequence[Ended], *, max_restarts: int) -> Verdict:
    """What follows from the failure of the last of ``attempts``, which are all that there were."""
    outcome = attempts[-1].outcome
    if not may_restart(outcome):
        return Verdict(outcome=outcome)
    if sum(attempt.outcome.cause == "oom" for attempt in attempts) > MAX_OOM and outcome.cause == "oom":
        return Verdict(outcome=replace(outcome, message=f"{outcome.message} (again)", retry=False))
    in_vain = attempts[len(attempts) - num_in_vain(attempts) :]
    if len(attempts) > 1 and len(in_vain) >= IN_VAIN:
        return Verdict(outcome=_gave_up(in_vain, outcome))
    return Verdict(outcome=outcome, restart=len(attempts) <= max_restarts)


def num_in_vain(attempts: Sequence[Ended]) -> int:
    """How many attempts at the end made no progress."""
    best, number = -1, 0
    for attempt in attempts:
        progress = attempt.lived_s > LIVED_S if attempt.step is None else attempt.step > best
        best = max(best, best if attempt.step is None else attempt.step)
        number = 0 if progress else number + 1
    return number


def _gave_up(in_vain: Sequence[Ended], last: Outcome) -> Outcome:
    what = "; ".join(f"attempt {ended.outcome.attempt}: {ended.outcome.message}" for ended in in_vain)
    message = f"gave up after {len(in_vain)} attempts without progress: {what}"
    return replace(last, code=Exit.GAVE_UP, cause="gave_up", message=message, retry=False)
