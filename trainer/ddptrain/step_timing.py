"""Measures the phases of a step. Records traces.

The phases of a step add up to its duration, and no device waits for the measurement. On a CPU, a clock is read between
the phases. On a GPU, an event is recorded between the phases, because the host may be many steps ahead. The time
between two events is read when the GPU has passed both events.

``comm_exposed`` is the time from a rank's last gradient to the end of the all-reduce, and that of other exchanges
(`Communication`). Sharded ranks wait for each other during ``forward`` and ``backward``, so they have no
``comm_exposed``. ``other`` is the time for the vote, the metrics and the heartbeat.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from ddpwire.metrics import STEP_PHASES

SKIPPED_STEPS = 3  # in the first steps memory is allocated, and then DDP builds its buckets again
WARM_UP_STEPS = 1  # for the profiler to warm up
Mark = tuple[str, Any]  # a phase, and its end: the time of the clock, or an event in the stream of the GPU


class Phases:
    """Measures the steps. Call ``begin`` for each step, ``mark`` at the end of each phase, and finally ``end``."""

    def __init__(self, *, on_gpu: bool = False) -> None:
        self.totals = dict.fromkeys(STEP_PHASES, 0.0)  # seconds per phase, over all measured steps
        # For each step since it was last emptied: the rank's own time, without waiting for the others.
        self.own_s: deque[float] = deque(maxlen=100)
        self.forget_own()
        self.completed: deque[tuple[int, float]] = deque()  # number and seconds of each step; the caller empties it
        self._on_gpu = on_gpu
        self._marks: list[Mark] = []  # of this step
        self._ready: Any = None  # when the rank's last gradient was ready
        self._pending: deque[tuple[int, list[Mark]]] = deque()  # earlier steps that the GPU may not have finished
        self._spare: list[torch.cuda.Event] = []

    def forget_own(self) -> None:
        """Begin a new sum of the rank's own times, without those of the first steps."""
        self.num_own, self.own_total_s = -SKIPPED_STEPS, 0.0

    def begin(self) -> None:
        """Begin a step, and read the events of the steps that the GPU has finished."""
        while self._pending and self._pending[0][1][-1][1].query():
            self._add(*self._pending.popleft())
        self._marks, self._ready = [("", self._now())], None

    def mark(self, phase: str) -> None:
        """End a phase. A step may have the same phase several times."""
        if phase == "backward" and self._ready is not None:
            self._marks.append((phase, self._ready))
            phase, self._ready = "comm_exposed", None
        self._marks.append((phase, self._now()))

    def gradients_ready(self) -> None:
        """Record that this rank's last gradient is ready. In the rest of ``backward``, it waits for other ranks."""
        self._ready = self._now()

    def end(self, step: int) -> None:
        """End the step. The time since the last mark is the phase ``other``."""
        self.mark("other")
        if self._on_gpu:
            self._pending.append((step, self._marks))
        else:
            self._add(step, self._marks)

    def _now(self) -> Any:
        """Return the time: on a GPU, an event in its stream. A call on a CPU returns only after its work is done."""
        if not self._on_gpu:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _add(self, step: int, marks: list[Mark]) -> None:
        own_s = total_s = 0.0
        for (_, before), (phase, after) in pairwise(marks):
            seconds = before.elapsed_time(after) / 1000 if self._on_gpu else after - before
            self.totals[phase] += seconds
            total_s += seconds
            own_s += 0.0 if phase in ("comm_exposed", "other") else seconds
        self.own_s.append(own_s)
        self.num_own += 1
        self.own_total_s += own_s if self.num_own > 0 else 0.0
        self.completed.append((step, total_s))
        if self._on_gpu:
            self._spare += [event for _, event in marks]


def measure_phases(device: torch.device, parameters: Iterable[Tensor], *, alone: bool, sharded: bool = False) -> Phases:
    """Return what measures steps on this device. ``parameters`` are in the order of the model's forward pass."""
    phases = Phases(on_gpu=device.type == "cuda")
    if sharded:
        del phases.totals["comm_exposed"]
    first = next((parameter for parameter in parameters if parameter.requires_grad), None)
    if first is not None and not alone and not sharded:  # its gradient is computed last
        first.register_post_accumulate_grad_hook(lambda _: phases.gradients_ready())  # type: ignore[no-untyped-call]
    return phases


class Tracer:
    """Records ``num_steps`` steps of this rank in a trace for https://ui.perfetto.dev. The first steps are left out."""

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
        self._left -= 1
        if self._left == 0:
            self.end()
        elif self._profile is not None:
            self._profile.step()

    def end(self) -> None:
        """Write the trace, unless it is already written."""
        if self._profile is None:
            return
        running, self._profile = self._profile, None
        running.stop()
        if self._left >= self._num_steps:
            first = SKIPPED_STEPS + WARM_UP_STEPS + 1
            self._log(f"no trace: --profile needs at least {first} steps after the start")
            return
        steps = self._num_steps - self._left
        try:
            running.export_chrome_trace(str(self._path))
            self._log(f"trace of {steps} steps in {self._path}: open it in https://ui.perfetto.dev")
        except (OSError, RuntimeError) as error:
            self._log(f"the trace {self._path} cannot be written: {error}")
