"""The metrics of a rank for Prometheus, those of ddpwire.metrics.

Under ddprun, which names a folder for them, ``open_metrics`` returns metrics that are written with prometheus_client to
files that ddprun collects; elsewhere it returns metrics that do nothing, and prometheus_client is not imported.
"""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ddpwire import metrics as catalogue
from ddpwire import names


@dataclass(frozen=True, kw_only=True)
class TrainingInfo:
    """What is trained, and where."""

    backend: str  # of the gradients; none: one rank
    device: str
    model: str
    dataset: str
    num_steps: int
    flops_per_sample: int  # of a training step; 0: not known


class Metrics:
    """Metrics that do nothing."""

    enabled = False  # whether they are written

    def training_info(self, info: TrainingInfo) -> None:
        """Set what is trained."""

    def step(self, *, step: int, epoch: int, samples: int, lr: float) -> None:
        """Count an optimizer step."""

    def step_duration(self, seconds: float) -> None:
        """Observe the duration of a step, of the last one or an earlier one."""

    def time_spent(self, phases: Mapping[str, float], productive_s: float, lost: Mapping[str, float]) -> None:
        """Set seconds since the start: of the steps by phase, productive ones, unproductive ones by cause."""

    def lost_before(self, lost: Mapping[str, float]) -> None:
        """Add the seconds by cause that were lost before this process was started."""

    def time_totals(self) -> dict[str, float]:
        """Return the seconds of this rank in all starts of the run, "productive" and by cause; empty: not kept."""
        return {}

    def comm_hidden(self, seconds: float) -> None:
        """Add seconds of gradient communication that overlapped with the backward pass."""

    def flush(self) -> None:
        """Write what was added up."""

    def epoch(self, *, loss: float, accuracy: float, grad_norm: float) -> None:
        """Set the results of an epoch."""

    def skew(self, ratio: float, speed: float) -> None:
        """Set how the slowest rank compares with the others, and the speed of this one."""

    def memory(self, **kinds: int) -> None:
        """Set bytes on the GPU by kind."""

    def nonfinite(self, where: str) -> None:
        """Count a NaN or an infinity of this rank; ``where``: loss or grad."""

    def data_error(self, kind: str) -> None:
        """Count a file of the dataset that is missing or corrupt."""

    def timed_out(self) -> None:
        """Count a collective that timed out."""

    def out_of_memory(self) -> None:
        """Count an out-of-memory error of the GPU."""

    def checkpoint_saved(self, *, step: int, seconds: float, size_bytes: int, retained: int) -> None:
        """Record a checkpoint that was written."""

    def checkpoint_loaded(self, *, seconds: float, step: int, written_at: float, size_bytes: int) -> None:
        """Record a checkpoint that was read; ``written_at``: in seconds since the epoch."""

    def checkpoint_fallback(self) -> None:
        """Count a checkpoint that was set aside for an older one."""

    def checkpoint_failed(self, *, op: str, reason: str) -> None:
        """Count a failed write or read of a checkpoint; the values are those of the catalogue."""


class RankMetrics(Metrics):
    """The metrics that every rank has. Raises OSError when the files cannot be written.

    A write costs some microseconds: what changes with every step is added up until ``flush``.
    """

    enabled = True

    def __init__(self) -> None:
        from ddpwire.series import counter, gauge, histogram  # imports prometheus_client

        self._folder = os.environ[names.PROMETHEUS_MULTIPROC_DIR]
        self._steps, self._samples = counter(catalogue.STEPS), counter(catalogue.SAMPLES)
        self._step_seconds = histogram(catalogue.STEP_DURATION)
        self._last_step, self._last_step_time = gauge(catalogue.LAST_STEP), gauge(catalogue.LAST_STEP_TIME)
        self._flops = counter(catalogue.MODEL_FLOPS)
        self._productive = counter(catalogue.PRODUCTIVE)
        self._phase, lost, self._comm = (
            counter(metric) for metric in (catalogue.STEP_PHASE, catalogue.UNPRODUCTIVE, catalogue.COMM)
        )
        self._lost = {value: lost.labels(cause=value) for value in catalogue.UNPRODUCTIVE_CAUSES}
        self._speed = gauge(catalogue.RELATIVE_SPEED)
        nonfinite, data_errors = counter(catalogue.NONFINITE), counter(catalogue.DATA_ERRORS)
        self._nonfinite = {where: nonfinite.labels(where=where) for where in catalogue.NONFINITE.labels["where"]}
        self._data_errors = {kind: data_errors.labels(kind=kind) for kind in catalogue.DATA_ERRORS.labels["kind"]}
        self._timeouts = counter(catalogue.COLLECTIVE_TIMEOUTS)
        self._flops_per_sample = 0
        self._exported: dict[str, float] = {}
        self._unwritten_steps = self._unwritten_samples = 0
        self._step = 0
        self._unwritten_s: list[float] = []

    def training_info(self, info: TrainingInfo) -> None:
        """Set the FLOPs of a sample."""
        self._flops_per_sample = info.flops_per_sample

    def step(self, *, step: int, epoch: int, samples: int, lr: float) -> None:  # noqa: ARG002 - rank 0 exports the rest
        """Count an optimizer step."""
        self._step = step
        self._unwritten_steps += 1
        self._unwritten_samples += samples

    def step_duration(self, seconds: float) -> None:
        """Observe the duration of a step."""
        self._unwritten_s.append(seconds)

    def flush(self) -> None:
        """Write what was added up."""
        for seconds in self._unwritten_s:
            self._step_seconds.observe(seconds)
        self._unwritten_s.clear()
        if not self._unwritten_steps:
            return
        self._steps.inc(self._unwritten_steps)
        self._samples.inc(self._unwritten_samples)
        self._flops.inc(self._unwritten_samples * self._flops_per_sample)
        self._unwritten_steps = self._unwritten_samples = 0
        self._last_step.set(self._step)
        self._last_step_time.set(time.time())

    def time_spent(self, phases: Mapping[str, float], productive_s: float, lost: Mapping[str, float]) -> None:
        """Set seconds since the start."""
        for name, seconds in phases.items():
            self._phase.labels(phase=name).inc(self._more(name, seconds))
        for name, seconds in lost.items():
            self._lost[name].inc(self._more(name, seconds))
        self._productive.inc(self._more("productive", productive_s))
        if "comm_exposed" in phases:
            self._comm.labels(overlap="exposed").inc(self._more("exposed", phases["comm_exposed"]))

    def _more(self, name: str, seconds: float) -> float:
        more = max(0.0, seconds - self._exported.get(name, 0.0))
        self._exported[name] = max(seconds, self._exported.get(name, 0.0))
        return more

    def lost_before(self, lost: Mapping[str, float]) -> None:
        """Add the seconds by cause."""
        for cause, seconds in lost.items():
            self._lost[cause].inc(seconds)

    def time_totals(self) -> dict[str, float]:
        """Return what is in the files that ddprun collects, also those of earlier processes."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.multiprocess import MultiProcessCollector

        families = MultiProcessCollector(CollectorRegistry(), self._folder).collect()  # type: ignore[no-untyped-call]
        wanted = (catalogue.PRODUCTIVE.name, catalogue.UNPRODUCTIVE.name)
        samples = (sample for family in families for sample in family.samples if sample.name in wanted)
        return {sample.labels.get("cause", "productive"): sample.value for sample in samples}

    def comm_hidden(self, seconds: float) -> None:
        """Add seconds of gradient communication."""
        self._comm.labels(overlap="hidden").inc(seconds)

    def skew(self, ratio: float, speed: float) -> None:  # noqa: ARG002 - rank 0 exports the rest
        """Set the speed of this rank, compared with the others."""
        self._speed.set(speed)

    def memory(self, **kinds: int) -> None:
        """Set bytes on the GPU by kind."""
        if not hasattr(self, "_memory"):
            from ddpwire.series import counter, gauge

            memory = gauge(catalogue.DEVICE_MEMORY)
            self._memory = {kind: memory.labels(kind=kind) for kind in catalogue.DEVICE_MEMORY.labels["kind"]}
            self._ooms = counter(catalogue.DEVICE_OOMS)
        for kind, size in kinds.items():
            self._memory[kind].set(size)

    def nonfinite(self, where: str) -> None:
        """Count a NaN or an infinity of this rank; ``where``: loss or grad."""
        self._nonfinite[where].inc()

    def data_error(self, kind: str) -> None:
        """Count a file of the dataset that is missing or corrupt."""
        self._data_errors[kind].inc()

    def timed_out(self) -> None:
        """Count a collective that timed out."""
        self._timeouts.inc()

    def out_of_memory(self) -> None:
        """Count an out-of-memory error of the GPU."""
        self.memory()
        self._ooms.inc()


class FirstRankMetrics(RankMetrics):
    """The metrics of rank 0: also those that are the same for all ranks, and those of its checkpoints."""

    def __init__(self) -> None:
        from ddpwire.series import counter, gauge, histogram

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

    def training_info(self, info: TrainingInfo) -> None:
        """Set what is trained."""
        super().training_info(info)
        self._info.labels(backend=info.backend, device=info.device, model=info.model, dataset=info.dataset).set(1)
        self._planned.set(info.num_steps)

    def step(self, *, step: int, epoch: int, samples: int, lr: float) -> None:
        """Count an optimizer step."""
        self._lr, self._epoch = lr, epoch
        super().step(step=step, epoch=epoch, samples=samples, lr=lr)

    def flush(self) -> None:
        """Write what was added up."""
        if self._unwritten_steps:
            self._lr_gauge.set(self._lr)
            self._epoch_gauge.set(self._epoch)
        super().flush()

    def epoch(self, *, loss: float, accuracy: float, grad_norm: float) -> None:
        """Set the results of an epoch, and write what was added up: the loss stands beside the step that it is of."""
        self.flush()
        self._loss.set(loss)
        self._accuracy.set(accuracy)
        self._grad_norm.set(grad_norm)

    def skew(self, ratio: float, speed: float) -> None:
        """Set how the slowest rank compares with the others, and the speed of this one."""
        self._skew.set(ratio)
        super().skew(ratio, speed)

    def checkpoint_saved(self, *, step: int, seconds: float, size_bytes: int, retained: int) -> None:
        """Record a checkpoint that was written."""
        self._save_seconds.observe(seconds)
        self._saved_at.set(time.time())
        self._saved_step.set(step)
        self._saved_bytes.set(size_bytes)
        self._retained.set(retained)

    def checkpoint_loaded(self, *, seconds: float, step: int, written_at: float, size_bytes: int) -> None:
        """Record a checkpoint that was read."""
        self._saved_at.set(written_at)
        self._saved_step.set(step)
        self._saved_bytes.set(size_bytes)
        self._load_seconds.observe(seconds)

    def checkpoint_fallback(self) -> None:
        """Count a checkpoint that was set aside for an older one."""
        self._fallbacks.inc()

    def checkpoint_failed(self, *, op: str, reason: str) -> None:
        """Count a failed write or read of a checkpoint."""
        self._failures.labels(op=op, reason=reason).inc()


def open_metrics(environ: Mapping[str, str], *, first: bool) -> Metrics:
    """Return metrics that are written under ddprun; elsewhere, or where that fails, ones that do nothing.

    ``first``: for rank 0.
    """
    if not environ.get(names.PROMETHEUS_MULTIPROC_DIR):
        return Metrics()
    try:
        return FirstRankMetrics() if first else RankMetrics()
    except (ImportError, OSError) as error:
        print(f"ddptrain: training without metrics: {error}", file=sys.stderr)
        return Metrics()
