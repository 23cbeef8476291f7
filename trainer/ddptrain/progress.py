"""How far the training is, for who looks on: a bar on a terminal, a line now and then in a log. Rank 0 alone talks."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from ddpwire.streams import leave_lost

if TYPE_CHECKING:
    from rich.progress import TaskID

SAY_EVERY_S = 30.0


class Teller(Protocol):
    """What is told while it trains."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def step(self, step: int, num_steps: int, epoch: str, images_per_s: float) -> None:
        """A step was taken; ``epoch`` reads like 3/10."""

    def close(self) -> None:
        """There is nothing more to tell while it trains."""


class Silent:
    """Of all ranks but 0."""

    def say(self, text: str) -> None:
        """Nothing."""

    def step(self, step: int, num_steps: int, epoch: str, images_per_s: float) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines:
    """Into a file or a pipe: whole lines, and in a long epoch one now and then."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()

    def say(self, text: str) -> None:
        """A line."""
        self._said_at = time.monotonic()
        try:
            print(text, flush=True)
        except OSError as error:  # whoever read has gone (| head), or the log's disk is full: a training goes on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):
                print(f"ddptrain: warning: stdout cannot be written: {error.strerror}", file=sys.stderr, flush=True)

    def step(self, step: int, num_steps: int, epoch: str, images_per_s: float) -> None:
        """A line if the last one is long ago."""
        if time.monotonic() - self._said_at > SAY_EVERY_S:
            self.say(f"epoch {epoch:>5}   step {step} of {num_steps}   {images_per_s:.0f} images/s")

    def close(self) -> None:
        """Nothing is open."""


class Bar:
    """On a terminal: the lines, and below them a bar."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._progress: Progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TextColumn("step {task.completed:.0f} of {task.total:.0f}"),
            TextColumn("{task.fields[speed]:.0f} images/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            refresh_per_second=4,
            transient=True,
        )
        self._task: TaskID | None = None

    def say(self, text: str) -> None:
        """A line above the bar."""
        with _whoever_looks():
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, num_steps: int, epoch: str, images_per_s: float) -> None:
        """Move the bar."""
        if self._task is None:
            self._task = self._progress.add_task("", total=num_steps, epoch=epoch, speed=images_per_s)
            with _whoever_looks():
                self._progress.start()
        self._progress.update(self._task, completed=step, epoch=epoch, speed=images_per_s)

    def close(self) -> None:
        """Take the bar away."""
        if self._task is not None:
            with _whoever_looks():
                self._progress.stop()
            self._task = None


@contextmanager
def _whoever_looks() -> Iterator[None]:
    """A terminal that was closed is no reason to stop."""
    try:
        yield
    except OSError:
        leave_lost()


def teller(*, first: bool, environ: Mapping[str, str] = os.environ) -> Teller:
    """The one for this rank and its stdout."""
    if not first:
        return Silent()
    if sys.stdout.isatty() and environ.get("TERM") not in (None, "", "dumb"):
        try:
            return Bar()
        except ImportError:  # rich is a convenience
            pass
    return Lines()
