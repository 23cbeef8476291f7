"""The time of each phase of a step, the overlap of communication with the backward pass, and traces of the profiler.

The phases of a step add up to its duration, and no device waits for the measurement. On a CPU, a clock is read between
the phases. On a GPU, an event is recorded between the phases, and the time between two events is read when the GPU has
passed both. So the time of a step is measured on the GPU, because the host may be many steps ahead. ``comm_exposed`` is
the end of the backward pass, from the time when a rank's last gradient is ready to the end of the all-reduce. Sharded
ranks wait for each other within ``forward`` and ``backward``, so they have no ``comm_exposed``. ``other`` is the time
around a step: the vote on a stop, metrics, the heartbeat.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

from ddptrain import compat
from ddptrain.distributed import find_ddp
from ddpwire.metrics import STEP_PHASES

NANO = 1e-9
SKIPPED_STEPS = 3  # in the first steps memory is allocated, and then DDP builds its buckets again
WARM_UP_STEPS = 1  # for the profiler to warm up


@dataclass(frozen=True, slots=True)
class StepTime:
    """The duration of a step."""

    step: int
    seconds: float


class Phases(Protocol):
    """Measures the steps. Call ``begin`` for each step, ``mark`` at the end of each phase, and finally ``end``."""

    totals: dict[str, float]  # seconds per phase, over all measured steps
    own_s: deque[float]  # per step since it was last emptied: the rank's own time, without waiting for the others
    completed: deque[StepTime]  # the measured steps; the caller empties it

    def begin(self) -> None:
        """Begin a step."""

    def mark(self, phase: str) -> None:
        """End a phase; one step may have the same phase several times."""

    def gradients_ready(self) -> None:
        """Record that this rank's last gradient is ready; in the rest of ``backward`` it waits for other ranks."""

    def end(self, step: int) -> None:
        """End the step; the time since the last mark is the phase ``other``."""


class ClockPhases:
    """Measures phases on a CPU with a clock, because a call on a CPU returns when its work is done."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(STEP_PHASES, 0.0)
        self.own_s: deque[float] = deque(maxlen=100)
        self.completed: deque[StepTime] = deque()
        self._began = self._last = self._ready = self._waiting_s = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._began = self._last = time.perf_counter()
        self._ready = self._waiting_s = 0.0

    def mark(self, phase: str) -> None:
        """End a phase."""
        now = time.perf_counter()
        if phase == "backward" and self._ready:
            self.totals["comm_exposed"] += now - self._ready
            self._waiting_s += now - self._ready
            self.totals[phase] += self._ready - self._last
            self._ready = 0.0
        else:
            self.totals[phase] += now - self._last
        self._last = now

    def gradients_ready(self) -> None:
        """Record that during the rest of ``backward`` this rank only waits for the other ranks."""
        self._ready = time.perf_counter()

    def end(self, step: int) -> None:
        """End the step."""
        self._waiting_s += time.perf_counter() - self._last
        self.mark("other")
        self.own_s.append(self._last - self._began - self._waiting_s)
        self.completed.append(StepTime(step, self._last - self._began))


@dataclass(slots=True)
class PendingStep:
    """The events of a step in the stream of the GPU, each with the phase that ends there."""

    step: int
    marks: list[tuple[str, torch.cuda.Event]]


class EventPhases:
    """Measures phases on a GPU with events in its stream."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(STEP_PHASES, 0.0)
        self.own_s: deque[float] = deque(maxlen=100)
        self.completed: deque[StepTime] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._ready: torch.cuda.Event | None = None
        self._pending: deque[PendingStep] = deque()

    def begin(self) -> None:
        """Begin a step."""
        while self._pending and self._pending[0].marks[-1][1].query():  # type: ignore[no-untyped-call]
            self._add(self._pending.popleft())
        self._marks, self._ready = [("", self._event())], None

    def mark(self, phase: str) -> None:
        """End a phase."""
        if phase == "backward" and self._ready is not None:
            self._marks.append((phase, self._ready))
            phase, self._ready = "comm_exposed", None
        self._marks.append((phase, self._event()))

    def gradients_ready(self) -> None:
        """Record that during the rest of ``backward`` this rank only waits for the other ranks."""
        self._ready = self._event()

    def end(self, step: int) -> None:
        """End the step."""
        self.mark("other")
        self._pending.append(PendingStep(step, self._marks))

    def _event(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _add(self, pending: PendingStep) -> None:
        own_s = total_s = 0.0
        for (_, before), (phase, event) in pairwise(pending.marks):
            seconds = before.elapsed_time(event) / 1000
            self.totals[phase] += seconds
            total_s += seconds
            own_s += 0.0 if phase in ("comm_exposed", "other") else seconds
        self.own_s.append(own_s)
        self.completed.append(StepTime(pending.step, total_s))
        self._spare += [event for _, event in pending.marks]


def measure_phases(device: torch.device, parameters: Iterable[Tensor], *, alone: bool, sharded: bool = False) -> Phases:
    """Return an object that measures steps on this device.

    ``parameters`` are the model's, in the order of its forward pass. ``alone``: whether this is the only rank.
    """
    phases: Phases = EventPhases() if device.type == "cuda" else ClockPhases()
    if sharded:
        del phases.totals["comm_exposed"]
    first = next((one for one in parameters if one.requires_grad), None)
    if first is not None and not alone and not sharded:  # its gradient is computed last
        first.register_post_accumulate_grad_hook(lambda _: phases.gradients_ready())  # type: ignore[no-untyped-call]
    return phases


class Overlap:
    """How much of the gradient communication overlaps the backward pass; DDP measures this in every hundredth step."""

    def __init__(self, model: nn.Module) -> None:
        self._ddp = find_ddp(model)

    def hidden_s(self) -> float:
        """Return the seconds of overlap in a step, averaged over the measured steps, or 0 without DDP."""
        if self._ddp is None:
            return 0.0
        return NANO * compat.ddp_overlap_ns(self._ddp)


class Tracer:
    """Traces ``num_steps`` steps of this rank, after the first few steps, for https://ui.perfetto.dev."""

    def __init__(self, num_steps: int, path: Path, *, log: Callable[[str], None]) -> None:
        self._left = SKIPPED_STEPS + WARM_UP_STEPS + num_steps if num_steps else 0
        self.folder = path.parent
        self._path = path
        self._log = log
        self._profile: profile | None = None
        self._num_steps = num_steps

    def begin(self) -> None:
        """Start the profiler. Raises OSError if the folder of the trace cannot be created."""
        if not self._left:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs its start, and a missing GPU
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            schedule=schedule(wait=SKIPPED_STEPS, warmup=WARM_UP_STEPS, active=self._num_steps, repeat=1),
            record_shapes=True,
        )
        self._profile.start()

    def step(self) -> None:
        """Tell the profiler that a step has ended."""
        if self._profile is not None:
            self._left -= 1
            if self._left == 0:
                self.end()
            else:
                self._profile.step()

    def end(self) -> None:
        """Write the trace, unless it is already written."""
        if self._profile is None:
            return
        running, self._profile = self._profile, None
        running.stop()
        if self._left >= self._num_steps:
            first = SKIPPED_STEPS + WARM_UP_STEPS + 1
            self._log(f"no trace: the training ended less than {first} steps after this start (--profile)")
            return
        try:
            running.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            self._log(f"no trace: {self._path}: {error}")
            return
        self._log(f"trace of {self._num_steps - self._left} steps in {self._path}: open it in https://ui.perfetto.dev")
