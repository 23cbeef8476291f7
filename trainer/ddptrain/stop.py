"""The agreement of all ranks to stop after the same step, whichever of them a signal reached."""

import torch
import torch.distributed as dist

from ddptrain.place import Place
from ddptrain.signals import Signals


class Stop:
    """Asks at the end of a step and reads the answer at the end of the next, so that no rank waits for another."""

    def __init__(self, place: Place, signals: Signals) -> None:
        self._alone = place.size == 1
        self._signals = signals
        self._vote = torch.zeros(1, dtype=torch.int64)
        self._asked: dist.Work | None = None

    def after_step(self) -> int:
        """The exit code to stop with now, the same on every rank; 0: go on."""
        if self._alone:
            return self._signals.code
        code = self.answer()
        if code == 0:
            self._vote[0] = self._signals.code
            self._asked = dist.all_reduce(self._vote, op=dist.ReduceOp.MAX, async_op=True)
        return code

    def answer(self) -> int:
        """What was answered to the last question. To be read before the ranks part."""
        if self._asked is None:
            return 0
        self._asked.wait()
        self._asked = None
        return int(self._vote[0])
