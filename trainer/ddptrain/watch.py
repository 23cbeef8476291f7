"""What is seen of a training from outside while it runs, and what is heard: after each step, in a few microseconds."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ddptrain.errors import TrainError
from ddptrain.guard import Guard
from ddptrain.ledger import Ledger
from ddptrain.metrics import Metrics
from ddptrain.overlap import Overlap
from ddptrain.phases import Phases
from ddptrain.profiling import Tracer
from ddptrain.progress import Teller
from ddptrain.straggler import Comparison
from ddpwire.events import EventLog
from ddpwire.exits import Exit
from ddpwire.heartbeat import Heart

TIMES_EVERY_S = 0.5
DEVICE_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Watch:
    """All that goes on around the steps of one rank."""

    asked: Callable[[], int]  # the code that the ranks agree to stop with, 0: go on; every rank asks after every step
    heart: Heart
    metrics: Metrics
    ledger: Ledger
    phases: Phases
    guard: Guard
    ranks: Comparison
    tracer: Tracer
    teller: Teller
    overlap: Overlap
    events: EventLog
    on_gpu: bool
    _last: dict[str, float] = field(default_factory=dict)  # when something was last done

    def begin(self) -> None:
        """The first step is next. Raises TrainError."""
        self.ledger.ready()
        lost = self.ledger.lost_s
        self.events.tell(
            "training_began",
            seconds=self.ledger.total_s,
            startup_s=round(lost["startup"], 3),
            restore_s=round(lost["restore"], 3),
        )
        self._tell_times()
        try:
            self.tracer.begin()
        except OSError as error:
            raise TrainError(
                Exit.CANNOT_WRITE, f"--profile-dir {self.tracer.folder} cannot be made: {error.strerror}"
            ) from None

    def began(self) -> None:
        """A step begins."""
        self.phases.begin()

    def ended(self, *, step: int, epoch: int, samples: int, lr: float) -> int:
        """A step ended; the code to stop with, the same on every rank, or 0."""
        code = self.asked()
        self.heart.beat(step)
        self._count()
        self.metrics.step(step=step, epoch=epoch, samples=samples, lr=lr)
        if self.ranks.after(step, self.phases.own_s) and self.ranks.skew is not None:
            self.metrics.skew(self.ranks.skew.ratio, self.ranks.speed)
        self.tracer.step()
        if self._every("times", TIMES_EVERY_S):
            self._tell_times()
        if self._every("device", DEVICE_EVERY_S):
            self._tell_device(step)
        self.phases.end(step)
        return code

    def close(self) -> None:
        """The last step was taken."""
        self.phases.begin()  # reads what a GPU has passed by now
        self._count()
        self.tracer.end()
        self.teller.close()
        self.last_words()

    def last_words(self) -> None:
        """Have all metrics written."""
        self._tell_times()
        self._tell_device(None)

    def _count(self) -> None:
        while self.phases.took:
            took = self.phases.took.popleft()
            self.ledger.took(took.step, took.seconds)
            self.metrics.took(took.seconds)

    def _tell_times(self) -> None:
        self.metrics.times(self.phases.totals, self.ledger.productive_s, self.ledger.lost_s)
        self.metrics.flush()

    def _tell_device(self, step: int | None) -> None:
        if self.on_gpu:
            self.metrics.memory(
                allocated=torch.cuda.memory_allocated(),
                reserved=torch.cuda.memory_reserved(),
                peak=torch.cuda.max_memory_allocated(),
            )
        if self.metrics.on and step is not None:
            self.metrics.hidden(self.overlap.hidden_s() * (step - self._last.get("overlap", step)))
            self._last["overlap"] = step

    def _every(self, what: str, seconds: float) -> bool:
        now = time.monotonic()
        if now - self._last.get(what, 0.0) < seconds:
            return False
        self._last[what] = now
        return True
