"""The code that runs before and after each step of the training loop.

`NonFiniteGuard` finds NaN and infinite losses and gradients. `StopVote` lets the ranks agree on when to stop.
`ProgressDisplay` reports on stdout. `Callbacks` holds all objects that are called before or after a step.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ddprank.heartbeat import Heart
from ddprank.signals import Signals
from ddprank.vote import Vote
from ddptrain import compat
from ddptrain.distributed import RankInfo
from ddptrain.errors import log_warning, os_errors
from ddptrain.goodput import Goodput
from ddptrain.metrics import Metrics
from ddptrain.step_timing import Phases, Tracer
from ddptrain.straggler import StragglerDetector
from ddpwire import metrics as catalogue
from ddpwire.events import EventLog
from ddpwire.exits import Exit
from ddpwire.streams import leave_lost

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

MAX_OVERFLOWS = 20  # consecutive steps, after which a scale of 65,536 has become less than 1
LOG_EVERY_S = 30.0
NOT_FINITE = 1 << 10  # above all exit codes, so that it wins the vote
TIMES_EVERY_S = 0.5
DEVICE_EVERY_S = 5.0
_SIGNALS: dict[int, str] = {
    Exit.INTERRUPTED: "Ctrl-C",
    Exit.SAVED_USR1: "SIGUSR1",
    Exit.SAVED_USR2: "SIGUSR2",
    Exit.SAVED_TERM: "SIGTERM",
}


class NonFinite(Exception):  # noqa: N818 - a fact about a step, not an error message
    """Raised if optimizer step ``step`` (counted from 1) was not taken, because its loss or gradient is not finite."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class NonFiniteGuard:
    """Skips an optimizer step whose loss or gradient is not finite, so that no NaN reaches a weight or a checkpoint.

    If the loss is not finite on one rank, its gradient becomes NaN. The all-reduce spreads the NaN to every rank. So
    all ranks detect it after the same step, without further communication.

    On a CPU, ``check`` raises NonFinite before the step. On a GPU, ``check`` does not wait for the result. It sets a
    flag in the GPU's memory, which torch's fused optimizers read as ``found_inf``. While the flag is set, they change
    no weight. The CPU reads a copy of the flag one or more steps later.
    """

    def __init__(self, device: torch.device) -> None:
        self._norm: Tensor | None = None  # of the last gradient; may still be computed on the GPU
        self._overflows = torch.zeros((), device=device, dtype=torch.int64)
        self._no_more: Tensor | None = None  # NaN once a scaler's overflows have set the flag, 0 before
        self._flag: Tensor | None = None
        if device.type == "cuda":
            self._flag = torch.zeros((), device=device)  # 1: a step was not finite, and no more are taken
            self._step = torch.zeros((), device=device, dtype=torch.int64)  # the number of that step
            self._seen = torch.zeros((), dtype=torch.int64, pin_memory=True)  # a copy of _step on the host
            self._copied: torch.cuda.Event | None = None
            self._known = False  # whether a copy that was not 0 has arrived

    def with_nan_gradient(self, loss: Tensor) -> Tensor:
        """Return the loss. Its gradient is NaN if the loss is not finite, or if no more steps are to be taken."""
        factor = 1 + (loss - loss).detach()
        return loss * (factor if self._no_more is None else factor + self._no_more)

    def check(self, norm: Tensor, optimizer: torch.optim.Optimizer, *, step: int, scaled: bool = False) -> None:
        """Check the norm of the gradient before optimizer step ``step`` (counted from 1). Raises NonFinite.

        ``scaled`` states whether a GradScaler is used. A GradScaler skips a step that overflows, and reduces its scale.
        So an overflow is an error only after MAX_OVERFLOWS steps in a row.
        """
        self._norm = norm
        if scaled:
            self._overflows = (self._overflows + 1) * ~norm.isfinite()
            norm = torch.where(self._overflows < MAX_OVERFLOWS, 0.0, math.nan)
        if self._flag is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
            if not math.isfinite(norm.item()):
                raise NonFinite(step)
            return
        bad = (norm - norm) != 0  # two kernels; isfinite has four
        self._step += (bad & (self._flag == 0)) * step
        torch.maximum(self._flag, bad.float(), out=self._flag)
        if scaled:  # the scaler sets found_inf, from the gradients
            self._no_more = torch.where(self._flag > 0, math.nan, 0.0)
        else:
            optimizer.grad_scale, optimizer.found_inf = None, self._flag  # type: ignore[attr-defined]
        if self._copied is None or self._copy_arrived():
            self._seen.copy_(self._step, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    @property
    def last_norm(self) -> float:
        """The norm of the last gradient, or NaN before the first step. Waits for the device."""
        return math.nan if self._norm is None else self._norm.item()

    @property
    def detected(self) -> bool:
        """Whether the CPU already knows of a step that was not finite. Does not wait for the device."""
        if self._flag is None or self._copied is None:
            return False
        self._copy_arrived()
        return self._known

    @property
    def tripped(self) -> bool:
        """Whether any step so far was not finite. Waits for the device."""
        return self._flag is not None and bool(self._flag)

    def raise_if_tripped(self) -> None:
        """Wait for the device. Raise NonFinite if any step so far was not finite. Every rank must call this."""
        if self._flag is not None and (step := int(self._step)):
            raise NonFinite(step)

    def _copy_arrived(self) -> bool:
        """Read the last copy of the flag if it has arrived. Return whether it has arrived."""
        if self._copied is None or not self._copied.query():  # type: ignore[no-untyped-call]
            return False
        self._known = self._known or bool(self._seen)
        return True


class StopVote:
    """Lets the ranks agree on when to stop: after a signal, ``--stop-after``, or a step that was not finite."""

    def __init__(
        self, rank_info: RankInfo, signals: Signals, guard: NonFiniteGuard, *, after_s: float, started: float
    ) -> None:
        self._timed_out = False  # whether the time of --stop-after was up on this rank before any signal
        self._rank_info = rank_info
        self._signals = signals
        self._guard = guard
        self._deadline = started + after_s if after_s else None
        self._vote = Vote() if rank_info.size > 1 else None

    def poll(self) -> int:
        """Return the exit code with which all ranks stop now, or 0 to continue.

        Every rank must call this after every step. The result is NOT_FINITE if a step was not finite. Then
        `NonFiniteGuard.raise_if_tripped` raises NonFinite.
        """
        code = self._signals.code
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._timed_out = not code
            code = max(code, Exit.SAVED_TERM)
        if self._guard.detected:
            code = NOT_FINITE
        return self._vote.ask(code) if self._vote else code

    @property
    def requested_by(self) -> int | None:
        """The rank that received the signal, or None after --stop-after. Valid once all ranks have agreed."""
        if self._timed_out:
            return None
        return self._vote.asker if self._vote else self._rank_info.rank

    def cause(self, code: int) -> str:
        """Return what stopped the training with this exit code, such as "SIGTERM (received by rank 1)"."""
        if self._timed_out:
            return "--stop-after"
        other = "" if self._signals.code or self.requested_by is None else f" (received by rank {self.requested_by})"
        return _SIGNALS[code] + other

    def close(self) -> None:
        """Wait for the vote in progress. Call this before the process group is destroyed."""
        if self._vote:
            self._vote.answer()


class ProgressDisplay:
    """Shows the progress on stdout as lines, on a terminal with a bar below them. That of other ranks shows nothing."""

    def __init__(self, *, is_shown: bool = False, bar: "Progress | None" = None) -> None:
        self._is_shown, self._bar = is_shown, bar
        self._task: TaskID | None = None  # of the bar
        self._logged_at = time.monotonic()

    def log(self, text: str) -> None:
        """Print a line."""
        self._logged_at = time.monotonic()
        if not self._is_shown:
            return
        with self._without_errors():
            if self._bar is None:
                print(text, flush=True)
            else:
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, num_steps: int, epoch: str, speed: str) -> None:
        """Show that a step has ended. ``epoch`` is a text such as "3/10", ``speed`` one such as "900 images/s".

        In a long epoch, a file or a pipe gets a line every LOG_EVERY_S seconds.
        """
        if self._bar is None:
            if time.monotonic() - self._logged_at > LOG_EVERY_S:
                self.log(f"epoch {epoch:>5}   step {step} of {num_steps}   {speed}")
            return
        if self._task is None:
            self._task = self._bar.add_task("", total=num_steps, epoch=epoch, speed=speed)
            with self._without_errors():
                self._bar.start()
        self._bar.update(self._task, completed=step, epoch=epoch, speed=speed)

    def close(self) -> None:
        """End the display."""
        if self._bar is not None and self._task is not None:
            with self._without_errors():
                self._bar.stop()
            self._task = None

    @contextmanager
    def _without_errors(self) -> Iterator[None]:
        """Continue the training if stdout cannot be written."""
        try:
            yield
        except OSError as error:
            leave_lost()  # the terminal or the reader (| head) no longer exists
            if self._bar is None and not isinstance(error, BrokenPipeError):  # the disk is full
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                log_warning(f"stdout cannot be written: {error.strerror}")


def open_progress(*, first: bool, environ: Mapping[str, str]) -> ProgressDisplay:
    """Return the display that suits this rank and its stdout. ``first`` states whether this is rank 0."""
    if first and sys.stdout.isatty() and environ.get("TERM") not in (None, "", "dumb"):
        with suppress(ImportError):  # rich is optional
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            bar = Progress(
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(),
                TextColumn("step {task.completed:.0f} of {task.total:.0f}"),
                TextColumn("{task.fields[speed]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                refresh_per_second=4,
                transient=True,
            )
            return ProgressDisplay(is_shown=True, bar=bar)
    return ProgressDisplay(is_shown=first)


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """All callbacks of one rank. Together they take a few microseconds per step."""

    poll_stop: Callable[[], int]  # StopVote.poll
    heartbeat: Heart
    metrics: Metrics
    goodput: Goodput
    phases: Phases
    guard: NonFiniteGuard
    stragglers: StragglerDetector
    tracer: Tracer
    progress: ProgressDisplay
    ddp: nn.Module | None  # the DDP wrapper of the model, if it has one
    events: EventLog
    on_gpu: bool
    # When each periodic action last ran; for "overlap": at which step.
    _last: dict[str, float] = field(default_factory=dict)

    def on_train_begin(self) -> None:
        """Record that the start-up has ended, and start the profiler. Raises TrainError."""
        self.goodput.mark_ready()
        startup_s, restore_s = (round(self.goodput.lost_s[cause], 3) for cause in ("startup", "restore"))
        self.events.emit("training_began", seconds=self.goodput.total_s, startup_s=startup_s, restore_s=restore_s)
        self._export_times()
        with os_errors(Exit.CANNOT_WRITE, f"--profile-dir {self.tracer.folder} cannot be created"):
            self.tracer.begin()

    def on_step_end(self, *, step: int, epoch: int, samples: int, lr: float) -> int:
        """Record a step. Return the exit code with which all ranks stop, or 0 to continue."""
        code = self.poll_stop()
        self.heartbeat.beat(step)
        self._count_steps()
        self.metrics.step(step=step, epoch=epoch, samples=samples, lr=lr)
        if (ratios := self.stragglers.after_step(step, self.phases.own_s)) is not None:
            self.metrics.gauge(catalogue.STRAGGLER_SKEW, ratios[0])
            self.metrics.gauge(catalogue.RELATIVE_SPEED, ratios[1])
        self.tracer.step()
        if self._every("times", TIMES_EVERY_S):
            self._export_times()
        if self._every("device", DEVICE_EVERY_S):
            self._export_device(step)
        self.phases.end(step)
        return code

    def on_train_end(self) -> None:
        """Record the last steps and close the outputs."""
        self.phases.begin()  # reads the events that the GPU has passed
        self._count_steps()
        self.tracer.end()
        self.progress.close()
        self.flush_metrics()

    def flush_metrics(self) -> None:
        """Write all metrics."""
        self._export_times()
        self._export_device(None)

    def _count_steps(self) -> None:
        while self.phases.completed:
            step, seconds = self.phases.completed.popleft()
            self.goodput.add_step(step, seconds)
            self.metrics.step_duration(seconds)

    def _export_times(self) -> None:
        self.metrics.time_spent(self.phases.totals, self.goodput.productive_s, self.goodput.lost_s)
        self.metrics.flush()

    def _export_device(self, step: int | None) -> None:
        if self.on_gpu:
            self.metrics.memory(
                allocated=torch.cuda.memory_allocated(),
                reserved=torch.cuda.memory_reserved(),
                peak=torch.cuda.max_memory_allocated(),
            )
        if self.metrics.enabled and step is not None and "comm_exposed" in self.phases.totals:
            hidden_s = 1e-9 * compat.ddp_overlap_ns(self.ddp) * (step - self._last.get("overlap", step))
            self.metrics.count(catalogue.COMM, "hidden", number=hidden_s)
            self._last["overlap"] = step

    def _every(self, action: str, seconds: float) -> bool:
        now = time.monotonic()
        if now - self._last.get(action, 0.0) < seconds:
            return False
        self._last[action] = now
        return True
