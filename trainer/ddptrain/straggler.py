"""Finds stragglers, which are ranks that the other ranks wait for. Compares the ranks' own times for a step.

A rank's own time does not include the time in which it waits for other ranks. Every few steps, the ranks exchange
their shortest own times in an all-reduce. Each rank sends the shortest one since the last all-reduce. If a rank itself
is slow, all its steps are slow, so its shortest time is long. Another process on the rank's core slows down only some
steps, so the shortest time does not change. The ranks read the result a few steps later, so that no rank waits for it.
A rank is reported if it was slow in several comparisons in a row (see `StragglerPolicy`). It is reported again when it
is no longer slow.
"""

import math
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from ddptrain.distributed import RankInfo, gather
from ddpwire import names
from ddpwire.metrics import STRAGGLER_RATIO, STRAGGLER_S

EVERY_STEPS = 3  # steps between two all-reduces
COMPARISON_S = 0.8  # the all-reduces of this time are combined into one comparison
LASTING_S = 3.5  # minimum time of slow comparisons in a row: other processes may use a core for a second or two
WELL_RATIO = 1.5  # a reported rank is no longer slow below this ratio
IN_A_ROW = 2  # minimum number of comparisons in a row
FALSE_REPORTS = 1e-5  # expected number of healthy ranks that a comparison reports
PRIOR_SLOW, PRIOR_ALL = 0.5, 40.0  # counts to start with: slow ranks, and all ranks, in earlier comparisons


def compute_skew(own_s: Sequence[float], rank: int) -> tuple[float, float]:
    """Return two ratios of the ranks' own step times: the slowest one to the median, and the best one to this rank's.

    Of an even number of times, the median is the lower middle one.
    """
    return max(own_s) / statistics.median_low(own_s), min(own_s) / own_s[rank]


@dataclass(frozen=True, kw_only=True)
class StragglerEvent:
    """A report that a rank is slow, or that it is no longer slow. In the second case, ``ratio`` is 0."""

    rank: int
    ratio: float = 0.0


class StragglerPolicy:
    """Decides when to report that a rank is slow, and when to report that it is no longer slow. Has no side effects.

    A healthy rank is slow in a share p of all comparisons. p is measured in this training, without the ranks that are
    reported as slow. With independent comparisons, a healthy rank is slow in k comparisons in a row with probability
    p**k.

    A rank is reported if it was slow in k comparisons in a row that took at least LASTING_S seconds. k is the smallest
    number for which the sum of p**k over all ranks is at most FALSE_REPORTS, but at least IN_A_ROW.
    """

    def __init__(self, size: int) -> None:
        self._least_s = [math.inf] * size  # each rank's shortest time in this comparison
        self._seconds = 0.0  # how long this comparison has lasted
        self._in_a_row = [0] * size  # comparisons in a row in which a rank was slow, or a reported rank was not
        self._slow_s = [0.0] * size  # how long those slow comparisons lasted
        self._reported: set[int] = set()
        self._num_slow, self._num_all = PRIOR_SLOW, PRIOR_ALL

    def update(self, own_s: Sequence[float], *, seconds: float) -> list[StragglerEvent]:
        """Return the events to report now.

        ``own_s`` has each rank's shortest own time among the last few steps. ``seconds`` is how long these steps took
        together.
        """
        self._seconds += seconds
        self._least_s = list(map(min, self._least_s, own_s))
        if self._seconds < COMPARISON_S:
            return []
        typical_s = statistics.median_low(self._least_s)
        events = [self._judge(rank, one_s, typical_s) for rank, one_s in enumerate(self._least_s)]
        self._least_s, self._seconds = [math.inf] * len(own_s), 0.0
        return [event for event in events if event is not None]

    def _judge(self, rank: int, own_s: float, typical_s: float) -> StragglerEvent | None:
        if rank in self._reported:
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if own_s < WELL_RATIO * typical_s else 0
            if self._in_a_row[rank] < IN_A_ROW:
                return None
            self._reported.remove(rank)
            self._in_a_row[rank] = 0
            return StragglerEvent(rank=rank)
        self._num_all += 1
        if own_s < STRAGGLER_RATIO * typical_s or own_s - typical_s < STRAGGLER_S:
            self._num_slow += self._in_a_row[rank]
            self._in_a_row[rank], self._slow_s[rank] = 0, 0.0
            return None
        self._in_a_row[rank] += 1
        self._slow_s[rank] += self._seconds
        share = self._num_slow / self._num_all
        num_needed = max(IN_A_ROW, math.ceil(math.log(FALSE_REPORTS / len(self._least_s)) / math.log(share)))
        if self._in_a_row[rank] < num_needed or self._slow_s[rank] < LASTING_S:
            return None
        self._reported.add(rank)
        self._in_a_row[rank], self._slow_s[rank] = 0, 0.0
        return StragglerEvent(rank=rank, ratio=own_s / typical_s)


class StragglerDetector:
    """Compares the ranks' own step times. Every rank must call ``after_step`` after every step."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        on_event: Callable[[StragglerEvent, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_event`` is called on rank 0 with the event and the step."""
        self._rank = rank
        self._began_s = clock()  # when the present steps began
        self._pending_s = 0.0  # how long the steps of the pending all-reduce took
        self._policy = StragglerPolicy(size)
        self._on_event = on_event
        self._clock = clock
        self._times_s = torch.zeros(size, dtype=torch.float64)  # per rank; before the all-reduce, 0 for the other ranks
        self._pending: dist.Work | None = None

    def after_step(self, step: int, own_s: deque[float]) -> tuple[float, float] | None:
        """Return the ratios (`compute_skew`) of the last all-reduce, and start the next all-reduce with ``own_s``.

        This happens every EVERY_STEPS steps. After all other steps, return None. ``own_s`` has this rank's own times
        for the steps since the last all-reduce. This function empties ``own_s``.
        """
        if step % EVERY_STEPS or len(self._times_s) == 1:
            return None
        ratios = self.read_answer(step)
        # A GPU may not have finished any step yet: its rank sends 0, and then no rank compares.
        self._times_s.zero_()
        self._times_s[self._rank] = min(own_s, default=0.0)
        own_s.clear()
        now_s = self._clock()
        self._pending_s, self._began_s = now_s - self._began_s, now_s
        # The group's own method takes half the time of dist.all_reduce, which checks its arguments each time.
        self._pending = cast(dist.ProcessGroup, dist.group.WORLD).allreduce([self._times_s])
        return ratios

    def read_answer(self, step: int) -> tuple[float, float] | None:
        """Return the ratios of the pending all-reduce, or None. Also call this before the process group ends."""
        if self._pending is None:
            return None
        self._pending.wait()
        self._pending = None
        own_s = self._times_s.tolist()
        if min(own_s) <= 0:
            return None
        if self._rank == 0:
            for event in self._policy.update(own_s, seconds=self._pending_s):
                self._on_event(event, step)
        return compute_skew(own_s, self._rank)


@dataclass(frozen=True, kw_only=True)
class RankHost:
    """The machine that a rank runs on."""

    node: int | None  # the number that the launcher gave it; None: unknown
    host: str

    def __str__(self) -> str:
        return self.host if self.node is None else f"node {self.node} ({self.host})"


def gather_rank_hosts(rank_info: RankInfo, environ: Mapping[str, str]) -> list[RankHost]:
    """Return the machines of all ranks. Every rank must call this."""
    node = environ.get(names.RANKS_NODE) or environ.get(names.GROUP_RANK) or ""
    return gather(rank_info, RankHost(node=int(node) if node.isdecimal() else None, host=socket.gethostname()))


def straggler_message(event: StragglerEvent, rank_host: RankHost, step: int, percent: float | None = None) -> str:
    """Return one line that says that a rank is slow, or no longer slow.

    ``percent`` is the rank's share of a batch, or None if all ranks have the same. With shares that are proportional to
    the ranks' speeds, all ranks need the same time.
    """
    who = f"step {step}: rank {event.rank} on {rank_host}"
    if not event.ratio:
        return f"{who} is as fast as the others again"
    slow = "slow" if percent is None else f"slow for its share of a batch ({percent:.0f} %)"
    return f"{who} is {slow}: its steps take {event.ratio:.1f} times as long as those of the others"
