"""What this rank tells Prometheus: the metrics of ddpwire.catalogue that are set by ddptrain.

Written to files that ddprun collects, when it named a folder for them; else nothing is done and nothing is imported.
"""

import sys
import time
from collections.abc import Mapping

from ddpwire import catalogue, names


class Metrics:
    """What the trainer has to tell; here, to nobody."""

    def step(self, *, step: int, epoch: int, samples: int, seconds: float, lr: float) -> None:
        """An optimizer step was taken."""

    def epoch(self, *, loss: float, accuracy: float) -> None:
        """An epoch ended."""

    def saved(self, *, step: int, seconds: float, size_bytes: int) -> None:
        """A checkpoint was written."""

    def loaded(self, *, seconds: float) -> None:
        """A checkpoint was read."""

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
        self._loss = gauge(catalogue.LOSS)
        self._accuracy = gauge(catalogue.EVAL_ACCURACY).labels(split="test")
        durations = histogram(catalogue.CHECKPOINT_DURATION)
        self._save_seconds, self._load_seconds = durations.labels(op="save"), durations.labels(op="load")
        self._saved_at, self._saved_step = (
            gauge(catalogue.CHECKPOINT_LAST_SUCCESS),
            gauge(catalogue.CHECKPOINT_LAST_STEP),
        )
        self._saved_bytes = gauge(catalogue.CHECKPOINT_BYTES)
        self._failures = counter(catalogue.CHECKPOINT_FAILURES)
        for op in catalogue.CHECKPOINT_FAILURES.labels["op"]:
            for reason in catalogue.CHECKPOINT_FAILURES.labels["reason"]:
                self._failures.labels(op=op, reason=reason)

    def step(self, *, step: int, epoch: int, samples: int, seconds: float, lr: float) -> None:
        """An optimizer step was taken."""
        self._steps.inc()
        self._samples.inc(samples)
        self._step_seconds.observe(seconds)
        self._last_step.set(step)
        self._last_step_time.set(time.time())
        self._lr.set(lr)
        self._epoch.set(epoch)

    def epoch(self, *, loss: float, accuracy: float) -> None:
        """An epoch ended."""
        self._loss.set(loss)
        self._accuracy.set(accuracy)

    def saved(self, *, step: int, seconds: float, size_bytes: int) -> None:
        """A checkpoint was written."""
        self._save_seconds.observe(seconds)
        self._saved_at.set(time.time())
        self._saved_step.set(step)
        self._saved_bytes.set(size_bytes)

    def loaded(self, *, seconds: float) -> None:
        """A checkpoint was read."""
        self._load_seconds.observe(seconds)

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
