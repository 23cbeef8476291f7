"""Writes a rank's metrics for Prometheus. ddpwire.metrics defines them.

prometheus_client writes them to files in a folder that ddprun sets, and ddprun collects the files. Without ddprun,
nothing is written, and prometheus_client is not imported.
"""

import time
from collections.abc import Mapping
from itertools import product
from typing import Any

from ddptrain.errors import log_error
from ddpwire import metrics as catalogue
from ddpwire import names
from ddpwire.metrics import Metric


class Metrics:
    """The metrics of a rank. Some series are written only by rank 0.

    Values of series that this rank does not write are ignored. A write takes some microseconds, so values that change
    in every step are collected until ``flush``.
    """

    def __init__(self, folder: str = "", *, first: bool = False) -> None:
        """Write to files in ``folder``. If ``folder`` is empty, write nothing. Raises OSError.

        ``first`` states whether this process is rank 0.
        """
        self.enabled = bool(folder)
        self._series: dict[tuple[str, ...], Any] = {}  # keyed by the metric's name and the labels' values
        self._flops_per_sample = 0
        self._exported: dict[str, float] = {}
        self._unwritten_steps = self._unwritten_samples = 0
        self._step = self._epoch = 0
        self._lr = 0.0
        self._unwritten_s: list[float] = []
        for metric in catalogue.OF_A_RANK if folder else ():
            if not metric.needs_gpu and (first or not metric.by_rank_0):
                self._open(metric)

    def _open(self, metric: Metric) -> None:
        """Create a metric's series with the value 0. ``count`` creates those of phases and of communication."""
        from ddprank.series import series_of  # imports prometheus_client

        series = self._series[metric.name,] = series_of(metric)
        known = () if metric in (catalogue.STEP_PHASE, catalogue.COMM) else product(*metric.labels.values())
        for values in catalogue.CHECKPOINT_FAILURES_KNOWN if metric is catalogue.CHECKPOINT_FAILURES else known:
            if values:
                self._series[metric.name, *values] = series.labels(*values)

    def gauge(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge. ``labels`` are the values of its labels, in the order of ``metric.labels``."""
        if (series := self._series.get((metric.name, *labels))) is not None:
            series.set(value)

    def count(self, metric: Metric, *labels: str, number: float = 1) -> None:
        """Increase a counter. ``labels`` as for ``gauge``."""
        if (series := self._series.get((metric.name, *labels))) is None and (metric.name,) in self._series:
            series = self._series[metric.name, *labels] = self._series[metric.name,].labels(*labels)
        if series is not None:
            series.inc(number)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        if (series := self._series.get((metric.name, *labels))) is not None:
            series.observe(value)

    def training_info(self, *, num_steps: int, flops_per_sample: int, **labels: str) -> None:
        """Set the number of steps and the labels. ``flops_per_sample`` of a training step is 0 if it is unknown."""
        self._flops_per_sample = flops_per_sample
        self.gauge(catalogue.STEPS_PLANNED, num_steps)
        if (series := self._series.get((catalogue.TRAINING_INFO.name,))) is not None:
            series.labels(**labels).set(1)

    def step(self, *, step: int, epoch: int, samples: int, lr: float) -> None:
        """Count an optimizer step."""
        self._step, self._epoch, self._lr = step, epoch, lr
        self._unwritten_steps += 1
        self._unwritten_samples += samples

    def step_duration(self, seconds: float) -> None:
        """Record the duration of an optimizer step."""
        self._unwritten_s.append(seconds)

    def flush(self) -> None:
        """Write the collected values."""
        for seconds in self._unwritten_s:
            self.observe(catalogue.STEP_DURATION, seconds)
        self._unwritten_s.clear()
        if not self._unwritten_steps:
            return
        self.count(catalogue.STEPS, number=self._unwritten_steps)
        self.count(catalogue.SAMPLES, number=self._unwritten_samples)
        self.count(catalogue.MODEL_FLOPS, number=self._unwritten_samples * self._flops_per_sample)
        self._unwritten_steps = self._unwritten_samples = 0
        self.gauge(catalogue.LEARNING_RATE, self._lr)
        self.gauge(catalogue.EPOCH, self._epoch)
        self.gauge(catalogue.LAST_STEP, self._step)
        self.gauge(catalogue.LAST_STEP_TIME, time.time())

    def time_spent(self, phases: Mapping[str, float], productive_s: float, lost: Mapping[str, float]) -> None:
        """Record the seconds of each phase, of productive steps, and lost to each cause, since this process started."""
        for phase, seconds in phases.items():
            self.count(catalogue.STEP_PHASE, phase, number=self._more(phase, seconds))
        for cause, seconds in lost.items():
            self.count(catalogue.UNPRODUCTIVE, cause, number=self._more(cause, seconds))
        self.count(catalogue.PRODUCTIVE, number=self._more("productive", productive_s))
        if "comm_exposed" in phases:
            self.count(catalogue.COMM, "exposed", number=self._more("exposed", phases["comm_exposed"]))

    def _more(self, name: str, seconds: float) -> float:
        more = max(0.0, seconds - self._exported.get(name, 0.0))
        self._exported[name] = max(seconds, self._exported.get(name, 0.0))
        return more

    def epoch(self, *, loss: float, accuracy: float, grad_norm: float) -> None:
        """Set the results of an epoch. First write the collected values, so that the exported step matches the loss."""
        self.flush()
        self.gauge(catalogue.LOSS, loss)
        self.gauge(catalogue.EVAL_ACCURACY, accuracy, "test")
        self.gauge(catalogue.GRAD_NORM, grad_norm)

    def memory(self, **kinds: int) -> None:
        """Set the bytes of GPU memory. ``kinds``: allocated, reserved and peak. A rank on a CPU has no such series."""
        if self.enabled and (catalogue.DEVICE_MEMORY.name,) not in self._series:
            self._open(catalogue.DEVICE_MEMORY)
            self._open(catalogue.DEVICE_OOMS)
        for kind, size in kinds.items():
            self.gauge(catalogue.DEVICE_MEMORY, size, kind)

    def checkpoint(self, kind: str, *, seconds: float, step: int, written_at: float, size_bytes: int) -> None:
        """Record a checkpoint that was written or read (``kind``: "save" or "load"). ``written_at`` is a Unix time."""
        self.observe(catalogue.CHECKPOINT_DURATION, seconds, kind)
        self.gauge(catalogue.CHECKPOINT_LAST_SUCCESS, written_at)
        self.gauge(catalogue.CHECKPOINT_LAST_STEP, step)
        self.gauge(catalogue.CHECKPOINT_BYTES, size_bytes)


def open_metrics(environ: Mapping[str, str], *, first: bool) -> Metrics:
    """Return the metrics of this process. They are written only under ddprun and if their files can be created."""
    try:
        return Metrics(environ.get(names.PROMETHEUS_MULTIPROC_DIR, ""), first=first)
    except (ImportError, OSError) as error:
        log_error(f"training without metrics: {error}")
        return Metrics()
