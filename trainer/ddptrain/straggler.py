"""Which rank the others wait for. Every rank's own time of a step, without waiting, is compared with the others'.

Every few steps each rank gives the median of its last ones, in an all-reduce of one number each that is read a few
steps later: nobody waits. A rank is named, with its node, when it has been behind in the steps of half a second, and in
two answers at the least; and when it no longer is.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

EVERY = 5  # steps
LASTING_S = 0.5  # of short steps a few say nothing: a core may be another's for a moment
SLOW = 2.0  # times the others' median; the metric tells of less
SLOW_S = 0.005  # more than the others' median: less is the noise of a machine
IN_A_ROW = 2


@dataclass(frozen=True, kw_only=True)
class Skew:
    """How the ranks' own times compare."""

    slowest: int  # its rank
    ratio: float  # its time by the median of all ranks'
    behind_s: float  # its time minus that median
    speeds: tuple[float, ...]  # of each rank: the best time by its own, 0 to 1


def compare(own_s: Sequence[float]) -> Skew:
    """The skew of these times, one a rank. Of two ranks the faster one is the median."""
    typical, best = statistics.median_low(own_s), min(own_s)
    slowest = max(range(len(own_s)), key=own_s.__getitem__)
    return Skew(
        slowest=slowest,
        ratio=own_s[slowest] / typical,
        behind_s=own_s[slowest] - typical,
        speeds=tuple(best / one for one in own_s),
    )


@dataclass(frozen=True, kw_only=True)
class Naming:
    """What is to be said: this rank is slow, or (``ratio`` is 0) is as fast as the others again."""

    rank: int
    ratio: float = 0.0


class Judge:
    """Names a rank when it falls behind, and when it has caught up. Pure."""

    def __init__(self) -> None:
        self._named: int | None = None
        self._suspect: int | None = None
        self._times = 0
        self._since_s = 0.0

    def hear(self, skew: Skew, *, began_s: float, now_s: float) -> Naming | None:
        """What is to be said now; None: nothing. ``began_s``: when the first of the steps began that ``skew`` is of."""
        slow = skew.slowest if skew.ratio >= SLOW and skew.behind_s >= SLOW_S else None
        if slow == self._suspect:
            self._times += 1
        else:
            self._times, self._since_s = 1, began_s
        self._suspect = slow
        if self._times < IN_A_ROW or now_s - self._since_s < LASTING_S or slow == self._named:
            return None
        before, self._named = self._named, slow
        if slow is not None:
            return Naming(rank=slow, ratio=skew.ratio)
        return None if before is None else Naming(rank=before)


class Comparison:
    """The ranks' common question; to be asked by every rank after every step."""

    def __init__(
        self, rank: int, size: int, *, tell: Callable[[Naming, int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``tell`` is called on rank 0, with the step."""
        self.skew: Skew | None = None  # of the last answer
        self._rank = rank
        self._window_s = self._asked_window_s = clock()  # when the steps began that are being measured, or asked for
        self._judge = Judge()
        self._tell = tell
        self._clock = clock
        self._answers = torch.zeros(size, dtype=torch.float64)  # each rank's own in its place, and 0 elsewhere: the sum
        self._asked: dist.Work | None = None

    @property
    def speed(self) -> float:
        """Of this rank, as the last answer has it."""
        return self.skew.speeds[self._rank] if self.skew else 1.0

    def after(self, step: int, own_s: deque[float]) -> bool:
        """Whether there is a new ``skew``. ``own_s`` holds the times since the last question, and is emptied."""
        if step % EVERY or len(self._answers) == 1:
            return False
        news = self.answer(step)
        # A GPU may not have got round to any step yet; then there is nothing to compare, on any rank that hears it.
        self._answers.zero_()
        self._answers[self._rank] = statistics.median(own_s) if own_s else 0.0
        own_s.clear()
        self._asked_window_s, self._window_s = self._window_s, self._clock()
        # The group's own call takes half the time of dist.all_reduce, which looks at everything anew.
        self._asked = cast(dist.ProcessGroup, dist.group.WORLD).allreduce([self._answers])
        return news

    def answer(self, step: int) -> bool:
        """Read the answer to the last question. To be called before the ranks part."""
        if self._asked is None:
            return False
        self._asked.wait()
        self._asked = None
        own_s = self._answers.tolist()
        if min(own_s) <= 0:
            return False
        self.skew = compare(own_s)
        if self._rank == 0:
            naming = self._judge.hear(self.skew, began_s=self._asked_window_s, now_s=self._clock())
            if naming is not None:
                self._tell(naming, step)
        return True
