"""The metrics that every rank has, in prometheus_client's files, which ddprun collects.

A write costs some microseconds: what changes with every step is added up here until ``flush``.
"""

import time
from collections.abc import Mapping

from ddptrain.metrics import About, Metrics
from ddpwire import rank_catalogue as catalogue
from ddpwire.series import counter, gauge, histogram


class Exported(Metrics):
    """Of one rank. Raises OSError when the files cannot be written."""

    on = True

    def __init__(self) -> None:
        self._steps, self._samples = counter(catalogue.STEPS), counter(catalogue.SAMPLES)
        self._step_seconds = histogram(catalogue.STEP_DURATION)
        self._last_step, self._last_step_time = gauge(catalogue.LAST_STEP), gauge(catalogue.LAST_STEP_TIME)
        self._flops = counter(catalogue.MODEL_FLOPS)
        self._productive = counter(catalogue.PRODUCTIVE)
        phase, lost, comm = counter(catalogue.STEP_PHASE), counter(catalogue.UNPRODUCTIVE), counter(catalogue.COMM)
        self._phase = {value: phase.labels(phase=value) for value in catalogue.STEP_PHASES}
        self._lost = {value: lost.labels(cause=value) for value in catalogue.UNPRODUCTIVE_CAUSES}
        self._hidden, self._exposed = comm.labels(overlap="hidden"), comm.labels(overlap="exposed")
        self._speed = gauge(catalogue.RELATIVE_SPEED)
        nonfinite, data_errors = counter(catalogue.NONFINITE), counter(catalogue.DATA_ERRORS)
        self._nonfinite = {where: nonfinite.labels(where=where) for where in catalogue.NONFINITE.labels["where"]}
        self._data_errors = {kind: data_errors.labels(kind=kind) for kind in catalogue.DATA_ERRORS.labels["kind"]}
        self._timeouts = counter(catalogue.COLLECTIVE_TIMEOUTS)
        self._flops_a_sample = 0
        self._told: dict[str, float] = {}
        self._unwritten_steps = self._unwritten_samples = 0
        self._step = 0
        self._unwritten_s: list[float] = []

    def about(self, about: About) -> None:
        """What is going to be trained."""
        self._flops_a_sample = about.flops_a_sample

    def step(self, *, step: int, epoch: int, samples: int, lr: float) -> None:  # noqa: ARG002 - rank 0's to tell
        """An optimizer step was taken."""
        self._step = step
        self._unwritten_steps += 1
        self._unwritten_samples += samples

    def took(self, seconds: float) -> None:
        """So long did a step take."""
        self._unwritten_s.append(seconds)

    def flush(self) -> None:
        """Have all in the files."""
        for seconds in self._unwritten_s:
            self._step_seconds.observe(seconds)
        self._unwritten_s.clear()
        if not self._unwritten_steps:
            return
        self._steps.inc(self._unwritten_steps)
        self._samples.inc(self._unwritten_samples)
        self._flops.inc(self._unwritten_samples * self._flops_a_sample)
        self._unwritten_steps = self._unwritten_samples = 0
        self._last_step.set(self._step)
        self._last_step_time.set(time.time())

    def times(self, phases: Mapping[str, float], productive_s: float, lost: Mapping[str, float]) -> None:
        """Seconds since the start."""
        for children, values in ((self._phase, phases), (self._lost, lost)):
            for name, seconds in values.items():
                children[name].inc(self._more(name, seconds))
        self._productive.inc(self._more("productive", productive_s))
        self._exposed.inc(self._more("exposed", phases["comm_exposed"]))

    def _more(self, name: str, seconds: float) -> float:
        more = max(0.0, seconds - self._told.get(name, 0.0))
        self._told[name] = max(seconds, self._told.get(name, 0.0))
        return more

    def before(self, lost: Mapping[str, float]) -> None:
        """Seconds by cause."""
        for cause, seconds in lost.items():
            self._lost[cause].inc(seconds)

    def hidden(self, seconds: float) -> None:
        """Seconds of the gradients' way."""
        self._hidden.inc(seconds)

    def skew(self, ratio: float, speed: float) -> None:  # noqa: ARG002 - rank 0's to tell
        """How this rank compares."""
        self._speed.set(speed)

    def memory(self, **kinds: int) -> None:
        """Bytes on the GPU."""
        if not hasattr(self, "_memory"):
            memory = gauge(catalogue.DEVICE_MEMORY)
            self._memory = {kind: memory.labels(kind=kind) for kind in catalogue.DEVICE_MEMORY.labels["kind"]}
            self._ooms = counter(catalogue.DEVICE_OOMS)
        for kind, size in kinds.items():
            self._memory[kind].set(size)

    def nonfinite(self, where: str) -> None:
        """A number of this rank is none."""
        self._nonfinite[where].inc()

    def data_error(self, kind: str) -> None:
        """A file of the data set is missing or corrupt."""
        self._data_errors[kind].inc()

    def timed_out(self) -> None:
        """The other ranks were waited for in vain."""
        self._timeouts.inc()

    def out_of_memory(self) -> None:
        """The GPU has no more memory."""
        self.memory()
        self._ooms.inc()
