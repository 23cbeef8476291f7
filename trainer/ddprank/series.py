"""The metrics that a rank sets, written with prometheus_client to files that ddprun collects."""

import math
import os
import time
from typing import Any, Protocol

from prometheus_client import Counter, Gauge, Histogram

from ddpwire import metrics as catalogue
from ddpwire.events import events_of
from ddpwire.metrics import Metric


def series_of(metric: Metric) -> Any:
    """Return prometheus_client's counter, gauge or histogram of a metric. Raises OSError if its file is not writable.

    If two processes of a rank set the same gauge, the latest value counts.
    """
    labels = tuple(metric.labels)
    if metric.kind == "counter":
        return Counter(metric.name, metric.help, labels)
    if metric.kind == "gauge":
        return Gauge(metric.name, metric.help, labels, multiprocess_mode="mostrecent")
    return Histogram(metric.name, metric.help, labels, buckets=metric.buckets)


_GIVEN = {
    "total": catalogue.STEPS_PLANNED,
    "loss": catalogue.LOSS,
    "lr": catalogue.LEARNING_RATE,
    "epoch": catalogue.EPOCH,
}


class Scalar(Protocol):
    """A tensor that contains one number, such as a loss."""

    def item(self) -> float:
        """Return the number."""


class LoopSeries:
    """The metrics that a script reports from its own training loop. Raises OSError if a file cannot be written."""

    def __init__(self) -> None:
        self._steps, self._samples = series_of(catalogue.STEPS), series_of(catalogue.SAMPLES)
        self._last_step, self._last_step_time = series_of(catalogue.LAST_STEP), series_of(catalogue.LAST_STEP_TIME)
        self._duration = series_of(catalogue.STEP_DURATION)
        self._gauges: dict[str, Gauge] = {}
        self._step, self._ended = 0, 0.0
        self._reported = False  # a loss that is not finite

    def step(self, step: int, *, samples: int, **given: float | Scalar | None) -> None:
        """Record that one or more steps have ended since the last call. ``given``: total, loss, lr and epoch."""
        now = time.monotonic()
        num_steps = step - self._step
        if self._ended and num_steps > 0:
            self._steps.inc(num_steps)
            self._duration.observe((now - self._ended) / num_steps)
        else:  # the first step of this process
            self._steps.inc()
        self._step, self._ended = step, now
        self._samples.inc(samples)
        self._last_step.set(step)
        self._last_step_time.set(time.time())
        for name, metric in _GIVEN.items():
            if (value := given.get(name)) is not None:
                # float() of a tensor with a gradient warns
                number = value if isinstance(value, float | int) else float(value.item())
                self._set(metric, number)
                if name == "loss" and not math.isfinite(number) and not self._reported:
                    self._reported = True
                    events_of(os.environ).emit("not_finite", step=step, what="loss")

    def saved(self, step: int, size_bytes: int) -> None:
        """Record that a checkpoint is on the disk."""
        self._set(catalogue.CHECKPOINT_LAST_SUCCESS, time.time())
        self._set(catalogue.CHECKPOINT_LAST_STEP, step)
        self._set(catalogue.CHECKPOINT_BYTES, size_bytes)

    def _set(self, metric: Metric, value: float) -> None:
        if metric.name not in self._gauges:
            self._gauges[metric.name] = series_of(metric)
        self._gauges[metric.name].set(value)
