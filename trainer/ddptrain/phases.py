"""Where the time of a step goes, measured without making a device wait. The phases of a step add up to the step.

On a CPU a clock is read between the phases. A GPU gets an event there, and what lies between two events is read when
the GPU has passed both: the time of a step is then the GPU's, for the host may be many steps ahead of it.
``comm_exposed`` is the end of the backward pass: from the moment when a rank's last gradient is there to the moment
when the sums over the ranks are. ``other`` is what goes on around a step: the ranks' vote, metrics, a heartbeat.
"""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from ddpwire.rank_catalogue import STEP_PHASES


@dataclass(frozen=True, slots=True)
class Took:
    """A step that was measured."""

    step: int
    seconds: float


class Phases(Protocol):
    """The phases of one step after another: ``begin``, a ``mark`` at the end of each phase, ``end``."""

    totals: dict[str, float]  # seconds by phase, of all steps that were measured
    own_s: deque[float]  # of steps since it was last emptied: the rank's own time, without what the ranks do together
    took: deque[Took]  # the steps that were measured and nobody has fetched yet

    def begin(self) -> None:
        """A step begins."""

    def mark(self, phase: str) -> None:
        """The phase ends here; a step may have it several times."""

    def gradients_ready(self) -> None:
        """The rank's last gradient is there: what follows of ``backward`` is waiting for the others."""

    def end(self, step: int) -> None:
        """The step ends; what was not marked is ``other``."""


class ClockPhases:
    """On a CPU, where a call ends when its work is done."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(STEP_PHASES, 0.0)
        self.own_s: deque[float] = deque(maxlen=100)
        self.took: deque[Took] = deque()
        self._began = self._last = self._ready = self._together = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._began = self._last = time.perf_counter()
        self._ready = self._together = 0.0

    def mark(self, phase: str) -> None:
        """The phase ends here."""
        now = time.perf_counter()
        if phase == "backward" and self._ready:
            self.totals["comm_exposed"] += now - self._ready
            self._together += now - self._ready
            self.totals[phase] += self._ready - self._last
            self._ready = 0.0
        else:
            self.totals[phase] += now - self._last
        self._last = now

    def gradients_ready(self) -> None:
        """What follows of ``backward`` is waiting for the others."""
        self._ready = time.perf_counter()

    def end(self, step: int) -> None:
        """The step ends."""
        self._together += time.perf_counter() - self._last
        self.mark("other")
        self.own_s.append(self._last - self._began - self._together)
        self.took.append(Took(step, self._last - self._began))


@dataclass(slots=True)
class Passage:
    """A step's events in the GPU's stream, each with the phase that it ends."""

    step: int
    marks: list[tuple[str, torch.cuda.Event]]


class EventPhases:
    """On a GPU, by events in its stream."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(STEP_PHASES, 0.0)
        self.own_s: deque[float] = deque(maxlen=100)
        self.took: deque[Took] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._ready: torch.cuda.Event | None = None
        self._passing: deque[Passage] = deque()

    def begin(self) -> None:
        """A step begins."""
        while self._passing and self._passing[0].marks[-1][1].query():  # type: ignore[no-untyped-call]
            self._read(self._passing.popleft())
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

    def end(self, step: int) -> None:
        """The step ends."""
        self.mark("other")
        self._passing.append(Passage(step, self._marks))

    def _event(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _read(self, passage: Passage) -> None:
        own_s = total_s = 0.0
        for (_, before), (phase, event) in pairwise(passage.marks):
            seconds = before.elapsed_time(event) / 1000
            self.totals[phase] += seconds
            total_s += seconds
            own_s += 0.0 if phase in ("comm_exposed", "other") else seconds
        self.own_s.append(own_s)
        self.took.append(Took(passage.step, total_s))
        self._spare += [event for _, event in passage.marks]


def measure(device: torch.device, parameters: Iterable[Tensor], *, alone: bool) -> Phases:
    """The phases of steps on this device, of a model with these parameters in the order of its forward pass."""
    phases: Phases = EventPhases() if device.type == "cuda" else ClockPhases()
    first = next((one for one in parameters if one.requires_grad), None)
    if first is not None and not alone:  # its gradient is the last
        first.register_post_accumulate_grad_hook(lambda _: phases.gradients_ready())  # type: ignore[no-untyped-call]
    return phases
