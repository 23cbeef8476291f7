"""Numbers that are none: found before the optimizer's step, so that no weight and no checkpoint is spoilt by them.

A loss that is nan or infinite on one rank is made a nan gradient, which the all-reduce brings to every rank; so all
ranks see the same, after the same step, without asking each other. On a CPU the step is not taken and NonFinite raised.
A GPU is not waited for: a flag on it, once up, keeps every later step from changing anything (``found_inf``, with
which torch's fused optimizers serve its GradScaler), and is read when it has come over, a step or more later.
"""

import math

import torch
from torch import Tensor

MAX_OVERFLOWS = 20  # in a row: a scale of 65,536 is below 1 by then


class NonFinite(Exception):  # noqa: N818 - a fact about a step, not ours to report
    """Step number ``step``, from 1, was not taken."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class Guard:
    """Stands between the gradient and the optimizer."""

    def __init__(self, device: torch.device) -> None:
        self._norm: Tensor | None = None  # of the last gradient, not waited for
        self._overflows = torch.zeros((), device=device, dtype=torch.int64)
        self._flag: Tensor | None = None
        if device.type == "cuda":
            self._flag = torch.zeros((), device=device)  # 1: a step was not finite, and none is taken any more
            self._step = torch.zeros((), device=device, dtype=torch.int64)  # its number
            self._seen = torch.zeros((), dtype=torch.int64, pin_memory=True)  # the same, brought over
            self._copied: torch.cuda.Event | None = None
            self._known = False  # what was brought over until now

    def loss(self, loss: Tensor) -> Tensor:
        """The same loss, whose gradient is nan if it is not finite itself."""
        return loss * (1 + (loss - loss).detach())

    def gradient(self, norm: Tensor, optimizer: torch.optim.Optimizer, *, step: int, scaled: bool = False) -> None:
        """To be called with the gradient's norm before the optimizer's step number ``step``, from 1. Raises NonFinite.

        ``scaled``: by a GradScaler, which passes over a step that overflowed and scales less the next time; then only
        MAX_OVERFLOWS of them in a row are taken for more than that.
        """
        self._norm = norm
        if scaled:
            self._overflows = (self._overflows + 1) * ~norm.isfinite()
            norm = torch.where(self._overflows < MAX_OVERFLOWS, 0.0, math.nan)
        if self._flag is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
            if not math.isfinite(norm.item()):
                raise NonFinite(step)
            return
        bad = ~norm.isfinite()
        self._step += (bad & (self._flag == 0)) * step
        torch.maximum(self._flag, bad.float(), out=self._flag)
        if not scaled:  # else they are the scaler's own
            optimizer.grad_scale, optimizer.found_inf = None, self._flag  # type: ignore[attr-defined]
        if self._copied is None or self._arrived():
            self._seen.copy_(self._step, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    @property
    def last_norm(self) -> float:
        """The norm of the last gradient, nan before the first; waits for the device."""
        return math.nan if self._norm is None else self._norm.item()

    @property
    def seen(self) -> bool:
        """Whether a step was not finite, as far as is known here without waiting."""
        if self._flag is None or self._copied is None:
            return False
        self._arrived()
        return self._known

    @property
    def tripped(self) -> bool:
        """Whether a step was not finite; waits for the device."""
        return self._flag is not None and bool(self._flag)

    def prove(self) -> None:
        """Wait for the device, on every rank. Raises NonFinite if any step until now was not finite."""
        if self._flag is not None and (step := int(self._step)):
            raise NonFinite(step)

    def _arrived(self) -> bool:
        """Whether what was sent last has come over; it is read then."""
        if self._copied is None or not self._copied.query():  # type: ignore[no-untyped-call]
            return False
        self._known = self._known or bool(self._seen)
        return True
