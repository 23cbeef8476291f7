"""The catalogue's metrics as a rank sets them, with prometheus_client, in files that ddprun collects."""

import time

from prometheus_client import Counter, Gauge, Histogram

from ddpwire import metrics as catalogue
from ddpwire.metrics import Metric


def counter(metric: Metric) -> Counter:
    """A counter of the catalogue. Raises OSError when its file cannot be written, as the two below."""
    return Counter(metric.name, metric.help, tuple(metric.labels))


def gauge(metric: Metric) -> Gauge:
    """A gauge of the catalogue; of two processes of a rank that set it, the later one counts."""
    return Gauge(metric.name, metric.help, tuple(metric.labels), multiprocess_mode="mostrecent")


def histogram(metric: Metric) -> Histogram:
    """A histogram of the catalogue."""
    return Histogram(metric.name, metric.help, tuple(metric.labels), buckets=metric.buckets)


class LoopSeries:
    """What a script's own loop has to tell. Raises OSError when it cannot be written."""

    def __init__(self) -> None:
        self._steps, self._samples = counter(catalogue.STEPS), counter(catalogue.SAMPLES)
        self._last_step, self._last_step_time = gauge(catalogue.LAST_STEP), gauge(catalogue.LAST_STEP_TIME)
        self._duration = histogram(catalogue.STEP_DURATION)
        self._given: dict[str, Gauge] = {}
        self._step, self._ended = 0, 0.0

    def step(self, step: int, *, samples: int, loss: float | None, lr: float | None, epoch: int | None) -> None:
        """A step ended, or several since the last call."""
        now = time.monotonic()
        num_steps = step - self._step
        if self._ended and num_steps > 0:
            self._steps.inc(num_steps)
            self._duration.observe((now - self._ended) / num_steps)
        else:  # the first of this process
            self._steps.inc()
        self._step, self._ended = step, now
        self._samples.inc(samples)
        self._last_step.set(step)
        self._last_step_time.set(time.time())
        for metric, value in ((catalogue.LOSS, loss), (catalogue.LEARNING_RATE, lr), (catalogue.EPOCH, epoch)):
            if value is not None:
                if metric.name not in self._given:
                    self._given[metric.name] = gauge(metric)
                self._given[metric.name].set(float(value))
