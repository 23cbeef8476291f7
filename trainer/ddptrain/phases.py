"""Where the time of a step goes, measured without making a device wait.

On a CPU a clock is read between the phases. A GPU gets an event there, and what lies between two events is read when
the GPU has passed both. ``comm_exposed`` is the end of the backward pass: from the moment when a rank's last gradient
is there to the moment when the sums over the ranks are.
"""

import time
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from ddpwire.rank_catalogue import STEP_PHASES


class Phases(Protocol):
    """The phases of one step after another: ``begin``, a ``mark`` at the end of each phase, ``end``."""

    totals: dict[str, float]  # seconds by phase, of all steps that were measured
    own_s: deque[float]  # of steps since it was last emptied: the rank's own time, without waiting for others

    def begin(self) -> None:
        """A step begins."""

    def mark(self, phase: str) -> None:
        """The phase ends here; a step may have it several times."""

    def gradients_ready(self) -> None:
        """The rank's last gradient is there: what follows of ``backward`` is waiting for the others."""

    def end(self) -> None:
        """The step ends; what was not marked is ``other``."""


class ClockPhases:
    """On a CPU, where a call ends when its work is done."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(STEP_PHASES, 0.0)
        self.own_s: deque[float] = deque(maxlen=100)
        self._began = self._last = self._ready = self._waited = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._began = self._last = time.perf_counter()
        self._ready = self._waited = 0.0

    def mark(self, phase: str) -> None:
        """The phase ends here."""
        now = time.perf_counter()
        if phase == "backward" and self._ready:
            self.totals["comm_exposed"] += now - self._ready
            self._waited += now - self._ready
            self.totals[phase] += self._ready - self._last
            self._ready = 0.0
        else:
            self.totals[phase] += now - self._last
        self._last = now

    def gradients_ready(self) -> None:
        """What follows of ``backward`` is waiting for the others."""
        self._ready = time.perf_counter()

    def end(self) -> None:
        """The step ends."""
        self.mark("other")
        self.own_s.append(self._last - self._began - self._waited)


class EventPhases:
    """On a GPU, by events in its stream."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(STEP_PHASES, 0.0)
        self.own_s: deque[float] = deque(maxlen=100)
        self._spare: list[torch.cuda.Event] = []
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._ready: torch.cuda.Event | None = None
        self._passed: deque[list[tuple[str, torch.cuda.Event]]] = deque()

    def begin(self) -> None:
        """A step begins."""
        while self._passed and self._passed[0][-1][1].query():  # type: ignore[no-untyped-call]
            self._read(self._passed.popleft())
        self._marks, self._ready = [("", self._event())], None

    def mark(self, phase: str) -> None:
        """The phase ends here."""
        if phase == "backward" and self._ready is not None:
            self._marks.append((phase, self._ready))
            phase, self._ready = "comm_exposed", None
        self._marks.append((phase, self._event()))

    def gradients_ready(self) -> None:
        """What follows of ``backward`` is waiting for the others."""
        self._ready = self._event()

    def end(self) -> None:
        """The step ends."""
        self.mark("other")
        self._passed.append(self._marks)

    def _event(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _read(self, marks: list[tuple[str, torch.cuda.Event]]) -> None:
        own_s = 0.0
        for (_, before), (phase, event) in pairwise(marks):
            seconds = before.elapsed_time(event) / 1000
            self.totals[phase] += seconds
            own_s += 0.0 if phase == "comm_exposed" else seconds
        self.own_s.append(own_s)
        self._spare += [event for _, event in marks]


def measure(device: torch.device, parameters: Iterable[Tensor], *, alone: bool) -> Phases:
    """The phases of steps on this device, of a model with these parameters in the order of its forward pass."""
    phases: Phases = EventPhases() if device.type == "cuda" else ClockPhases()
    first = next((one for one in parameters if one.requires_grad), None)
    if first is not None and not alone:  # its gradient is the last
        first.register_post_accumulate_grad_hook(lambda _: phases.gradients_ready())  # type: ignore[no-untyped-call]
    return phases
