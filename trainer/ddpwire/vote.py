"""The agreement of all ranks to stop after the same step, whichever of them a signal reached. Imports torch."""

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist

PART_S = 2.0
_RANKS = 1 << 32  # code and rank are one number: the highest is the highest code, and of equals the lowest rank


class Vote:
    """Asks at the end of a step and reads the answer at the end of the next, so that no rank waits for another."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Among the ranks of ``group``, which talks over CPU tensors (gloo); None: of the default one."""
        self.asker = 0  # the rank whose code was agreed on
        self._group = group
        self._vote = torch.zeros(1, dtype=torch.int64)
        self._asked: dist.Work | None = None

    def ask(self, code: int) -> int:
        """The highest ``code`` that a rank gave when this was last called, the same on every rank; 0: continue."""
        agreed = self.answer()
        if agreed == 0:
            self._vote[0] = code * _RANKS + _RANKS - 1 - dist.get_rank() if code else 0
            self._asked = dist.all_reduce(self._vote, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed

    def answer(self) -> int:
        """What was answered to the last question. To be read before the ranks part."""
        if self._asked is None:
            return 0
        self._asked.wait()
        self._asked = None
        code, rest = divmod(int(self._vote[0]), _RANKS)
        self.asker = _RANKS - 1 - rest
        return code

    def meet(self) -> None:
        """Wait until every rank is here, or one of them is gone."""
        with contextlib.suppress(RuntimeError):
            dist.barrier(group=self._group)

    def part(self) -> None:
        """Let go of the question and the group. A peer that is gone, or hangs, is not waited for."""
        with contextlib.suppress(RuntimeError):
            if self._asked is not None:
                self._asked.wait(timedelta(seconds=PART_S))
        self._asked = self._group = None
