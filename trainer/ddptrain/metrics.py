"""What this rank tells Prometheus: the metrics of ddpwire.rank_catalogue.

Written to files that ddprun collects, when it named a folder for them; else nothing is done and nothing is imported.
"""

import sys
import time
from collections.abc import Mapping

from ddpwire import names
from ddpwire import rank_catalogue as catalogue

FLUSH_S = 0.5  # a write costs 10 us; what changes with every step need not be in the files with every step


class Metrics:
    """What the trainer has to tell; here, to nobody."""

    def step(self, *, step: int, epoch: int, samples: int, seconds: float, lr: float) -> None:
        """An optimizer step was taken."""

    def phases(self, totals: Mapping[str, float], lost: Mapping[str, float]) -> None:
        """Seconds since the start, of the steps by phase and of what was no step by cause. Now and then."""

    def flush(self) -> None:
        """Have all in the files."""

    def epoch(self, *, loss: float, accuracy: float, grad_norm: float) -> None:
        """An epoch ended."""

    def skew(self, ratio: float, speed: float) -> None:
        """How the slowest rank compares, and this one."""

    def memory(self, **kinds: int) -> None:
        """Bytes on the GPU."""

    def nonfinite(self, where: str) -> None:
        """A number of this rank is none."""

    def saved(self, *, step: int, seconds: float, size_bytes: int, retained: int) -> None:
        """A checkpoint was written."""

    def loaded(self, *, seconds: float) -> None:
        """A checkpoint was read."""

    def fell_back(self) -> None:
        """A checkpoint was set aside for an older one."""

    def checkpoint_failed(self, *, op: str, reason: str) -> None:
        """A checkpoint could not be written or read; the values are the catalogue's."""


class Exported(Metrics):
    """Metrics in prometheus_client's files. Raises OSError when they cannot be written."""

    def __init__(self) -> None:
        from ddpwire.series import counter, gauge, histogram

        self._steps, self._samples = counter(catalogue.STEPS), counter(catalogue.SAMPLES)
        self._step_seconds = histogram(catalogue.STEP_DURATION)
        self._last_step, self._last_step_time = gauge(catalogue.LAST_STEP), gauge(catalogue.LAST_STEP_TIME)
        self._lr, self._epoch = gauge(catalogue.LEARNING_RATE), gauge(catalogue.EPOCH)
        self._pending: tuple[int, int, float] | None = None  # step, epoch, lr
        self._unwritten_steps = self._unwritten_samples = 0
        self._unwritten_s = 0.0
        self._flushed_at = 0.0
        self._productive = counter(catalogue.PRODUCTIVE)
        phase, lost = counter(catalogue.STEP_PHASE), counter(catalogue.UNPRODUCTIVE)
        self._phase = {value: phase.labels(phase=value) for value in catalogue.STEP_PHASES}
        self._lost = {value: lost.labels(cause=value) for value in catalogue.UNPRODUCTIVE_CAUSES}
        self._told: dict[str, float] = {}
        self._skew, self._speed = gauge(catalogue.STRAGGLER_SKEW), gauge(catalogue.RELATIVE_SPEED)
        self._loss, self._grad_norm = gauge(catalogue.LOSS), gauge(catalogue.GRAD_NORM)
        self._accuracy = gauge(catalogue.EVAL_ACCURACY).labels(split="test")
        nonfinite = counter(catalogue.NONFINITE)
        self._nonfinite = {where: nonfinite.labels(where=where) for where in catalogue.NONFINITE.labels["where"]}
        self._open_checkpoints()

    def _open_checkpoints(self) -> None:
        from ddpwire.series import counter, gauge, histogram

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

    def step(self, *, step: int, epoch: int, samples: int, seconds: float, lr: float) -> None:
        """An optimizer step was taken."""
        self._step_seconds.observe(seconds)
        self._unwritten_steps += 1
        self._unwritten_samples += samples
        self._unwritten_s += seconds
        self._pending = (step, epoch, lr)
        if time.monotonic() - self._flushed_at > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Have all in the files."""
        if self._pending is None:
            return
        step, epoch, lr = self._pending
        self._pending = None
        self._flushed_at = time.monotonic()
        self._steps.inc(self._unwritten_steps)
        self._samples.inc(self._unwritten_samples)
        self._productive.inc(self._unwritten_s)
        self._unwritten_steps = self._unwritten_samples = 0
        self._unwritten_s = 0.0
        self._last_step.set(step)
        self._last_step_time.set(time.time())
        self._lr.set(lr)
        self._epoch.set(epoch)

    def phases(self, totals: Mapping[str, float], lost: Mapping[str, float]) -> None:
        """Seconds since the start."""
        for children, values in ((self._phase, totals), (self._lost, lost)):
            for name, seconds in values.items():
                if (more := seconds - self._told.get(name, 0.0)) > 0:
                    children[name].inc(more)
                    self._told[name] = seconds

    def epoch(self, *, loss: float, accuracy: float, grad_norm: float) -> None:
        """An epoch ended."""
        self._loss.set(loss)
        self._accuracy.set(accuracy)
        self._grad_norm.set(grad_norm)

    def skew(self, ratio: float, speed: float) -> None:
        """How the slowest rank compares, and this one."""
        self._skew.set(ratio)
        self._speed.set(speed)

    def memory(self, **kinds: int) -> None:
        """Bytes on the GPU."""
        if not hasattr(self, "_memory"):
            from ddpwire.series import gauge

            memory = gauge(catalogue.DEVICE_MEMORY)
            self._memory = {kind: memory.labels(kind=kind) for kind in catalogue.DEVICE_MEMORY.labels["kind"]}
        for kind, size in kinds.items():
            self._memory[kind].set(size)

    def nonfinite(self, where: str) -> None:
        """A number of this rank is none."""
        self._nonfinite[where].inc()

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


def open_metrics(environ: Mapping[str, str]) -> Metrics:
    """Exported ones under ddprun; elsewhere, and where the files cannot be written, ones that do nothing."""
    if not environ.get(names.PROMETHEUS_MULTIPROC_DIR):
        return Metrics()
    try:
        return Exported()
    except (ImportError, OSError) as error:
        print(f"ddptrain: training without metrics: {error}", file=sys.stderr)
        return Metrics()
