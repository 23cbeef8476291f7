"""The metrics that are the same for all ranks, or of what rank 0 does for all: it exports them beside its own."""

import time

from ddptrain.exported import Exported
from ddptrain.metrics import About
from ddpwire import rank_catalogue as catalogue
from ddpwire.series import counter, gauge, histogram


class ExportedFirst(Exported):
    """Of rank 0. Raises OSError when the files cannot be written."""

    def __init__(self) -> None:
        super().__init__()
        self._info, self._planned = gauge(catalogue.TRAINING_INFO), gauge(catalogue.STEPS_PLANNED)
        self._lr_gauge, self._epoch_gauge = gauge(catalogue.LEARNING_RATE), gauge(catalogue.EPOCH)
        self._lr, self._epoch = 0.0, 0
        self._skew = gauge(catalogue.STRAGGLER_SKEW)
        self._loss, self._grad_norm = gauge(catalogue.LOSS), gauge(catalogue.GRAD_NORM)
        self._accuracy = gauge(catalogue.EVAL_ACCURACY).labels(split="test")
        durations = histogram(catalogue.CHECKPOINT_DURATION)
        self._save_seconds, self._load_seconds = durations.labels(op="save"), durations.labels(op="load")
        self._saved_at = gauge(catalogue.CHECKPOINT_LAST_SUCCESS)
        self._saved_step = gauge(catalogue.CHECKPOINT_LAST_STEP)
        self._saved_bytes = gauge(catalogue.CHECKPOINT_BYTES)
        self._retained = gauge(catalogue.CHECKPOINTS_RETAINED)
        self._fallbacks = counter(catalogue.CHECKPOINT_FALLBACKS)
        self._failures = counter(catalogue.CHECKPOINT_FAILURES)
        for op, reason in catalogue.CHECKPOINT_FAILURES_KNOWN:
            self._failures.labels(op=op, reason=reason)

    def about(self, about: About) -> None:
        """What is going to be trained."""
        super().about(about)
        self._info.labels(backend=about.backend, device=about.device, model=about.model, dataset=about.dataset).set(1)
        self._planned.set(about.num_steps)

    def step(self, *, step: int, epoch: int, samples: int, lr: float) -> None:
        """An optimizer step was taken."""
        self._lr, self._epoch = lr, epoch
        super().step(step=step, epoch=epoch, samples=samples, lr=lr)

    def flush(self) -> None:
        """Have all in the files."""
        if self._unwritten_steps:
            self._lr_gauge.set(self._lr)
            self._epoch_gauge.set(self._epoch)
        super().flush()

    def epoch(self, *, loss: float, accuracy: float, grad_norm: float) -> None:
        """An epoch ended."""
        self._loss.set(loss)
        self._accuracy.set(accuracy)
        self._grad_norm.set(grad_norm)

    def skew(self, ratio: float, speed: float) -> None:
        """How the slowest rank compares, and this one."""
        self._skew.set(ratio)
        super().skew(ratio, speed)

    def saved(self, *, step: int, seconds: float, size_bytes: int, retained: int) -> None:
        """A checkpoint was written."""
        self._save_seconds.observe(seconds)
        self._saved_at.set(time.time())
        self._saved_step.set(step)
        self._saved_bytes.set(size_bytes)
        self._retained.set(retained)

    def loaded(self, *, seconds: float) -> None:
        """A checkpoint was read."""
        self._load_seconds.observe(seconds)

    def fell_back(self) -> None:
        """A checkpoint was set aside for an older one."""
        self._fallbacks.inc()

    def checkpoint_failed(self, *, op: str, reason: str) -> None:
        """A checkpoint could not be written or read."""
        self._failures.labels(op=op, reason=reason).inc()
