"""Makes all ranks stop after the same step, even if only one rank received a signal. This module imports torch."""

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist

PART_S = 2.0  # a rank that lives has answered by then
_RANKS = 1 << 32  # one number has code and rank: the maximum has the highest code and, of equal codes, the lowest rank


class Vote:
    """A vote that starts at the end of a step and is read at the end of the next step, so no rank waits for another."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """``group`` contains the ranks that vote (default: all). Its backend must support CPU tensors, as gloo does."""
        self.asker = 0  # the rank whose code was agreed on
        self._group = group
        self._vote = torch.zeros(1, dtype=torch.int64)
        self._asked: dist.Work | None = None

    def steps(self, step: int) -> tuple[int, int]:
        """Return the lowest and the highest ``step`` of the ranks.

        A rank that has reported no step calls this with 0. The lowest step is computed without such ranks.
        """
        ends = torch.tensor([-step if step else -_RANKS, step])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._group)
        return -int(ends[0]), int(ends[1])

    def ask(self, code: int) -> int:
        """Return the highest code that a rank gave in the previous call, or 0 if no rank asked to stop.

        All ranks get the same code.
        """
        agreed = self.answer()
        if agreed == 0:
            self._vote[0] = code * _RANKS + _RANKS - 1 - dist.get_rank() if code else 0
            self._asked = dist.all_reduce(self._vote, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed

    def answer(self) -> int:
        """Wait for the vote in progress, and return its result, or 0 if there is none.

        Call this before the process group is destroyed.
        """
        if self._asked is None:
            return 0
        self._asked.wait()
        self._asked = None
        code, rest = divmod(int(self._vote[0]), _RANKS)
        self.asker = _RANKS - 1 - rest
        return code

    def meet(self) -> None:
        """Wait until every rank has called this, or one of them has ended."""
        with contextlib.suppress(RuntimeError):
            dist.barrier(group=self._group)

    def part(self) -> None:
        """Abandon the vote in progress, and the group. Wait at most ``PART_S`` for a rank that has ended or hangs."""
        with contextlib.suppress(RuntimeError):
            if self._asked is not None:
                self._asked.wait(timedelta(seconds=PART_S))
        self._asked = self._group = None
