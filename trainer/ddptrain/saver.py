"""When and by whom a checkpoint is written: the loop waits for a copy in memory, a thread does the rest."""

import errno
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddptrain.checkpoint import Checkpoint, write
from ddptrain.metrics import Metrics
from ddptrain.options.checkpoints import CheckpointOptions
from ddptrain.shelf import Shelf
from ddptrain.snapshot import Snapshot
from ddpwire.events import EventLog

STUCK_S = 45.0  # without the disk having taken anything
POLL_S = 0.05


class Saver:
    """Writes checkpoints onto a shelf and keeps the newest and the best. One is written at a time.

    ``warn`` is told in a line what went wrong: training goes on, and the checkpoint before is whole. ``alive`` is
    called with the step while the loop waits here for the disk.
    """

    def __init__(
        self,
        shelf: Shelf,
        options: CheckpointOptions,
        metrics: Metrics,
        *,
        events: EventLog,
        warn: Callable[[str], None],
        alive: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._shelf = shelf
        self._options = options
        self._metrics = metrics
        self._events = events
        self._warn = warn
        self._alive = alive
        self._snapshot = Snapshot()
        self._writing: threading.Thread | None = None
        self._moved_at = 0.0
        self._waited_s = 0.0  # the loop, for the copy
        self._saved_at = time.monotonic()
        self.newest: Path | None = None  # the last one that was written, or read, whole

    def due(self, step: int) -> bool:
        """Whether the options ask for a checkpoint after this step, in the middle of an epoch."""
        every, minutes = self._options.every, self._options.minutes
        return bool((every and step % every == 0) or (minutes and time.monotonic() - self._saved_at >= 60 * minutes))

    def save(self, step: int, parts: Mapping[str, Any], shaping: Mapping[str, Any], accuracy: float | None) -> None:
        """Copy the state, and have it written."""
        if not self.settle(step):
            self._metrics.checkpoint_failed(op="save", reason="io")
            self._failed(step, f"the disk has not taken the one before it for {STUCK_S:g} s")
            return
        began = self._saved_at = time.monotonic()
        checkpoint = Checkpoint(step=step, shaping=shaping, parts=self._snapshot.take(parts), accuracy=accuracy)
        self._moved()
        self._waited_s = time.monotonic() - began
        self._writing = threading.Thread(target=self._write, args=(checkpoint, began), daemon=True, name="checkpoint")
        self._writing.start()

    def settle(self, step: int | None = None) -> bool:
        """Wait until what is being written is on the disk, or has failed. False: the disk is stuck.

        ``step``: how far the training is; None: it is over, and gives no more signs of life.
        """
        while self._writing is not None and self._writing.is_alive():
            if time.monotonic() - self._moved_at > STUCK_S:
                return False
            self._writing.join(POLL_S)
            if step is not None:
                self._alive(step)
        self._writing = None
        return True

    def _write(self, checkpoint: Checkpoint, began: float) -> None:
        path = self._shelf.path(checkpoint.step)
        try:
            self._snapshot.wait()
            size_bytes = write(path, checkpoint, moved=self._moved)
            self.newest = path
            retained = self._shelf.thin_out(keep=self._options.keep, keep_best=self._options.keep_best, written=path)
        except Exception as error:  # whatever it is, the training need not end for it
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._metrics.checkpoint_failed(op="save", reason="enospc" if full else "io")
            reason = error.strerror if isinstance(error, OSError) else error
            self._failed(checkpoint.step, f"{path}: {reason}")
        else:
            seconds = time.monotonic() - began
            self._metrics.saved(step=checkpoint.step, seconds=seconds, size_bytes=size_bytes, retained=retained)
            self._events.tell(
                "checkpoint_saved",
                step=checkpoint.step,
                seconds=seconds,
                waited_s=round(self._waited_s, 4),
                bytes=size_bytes,
                path=str(path),
            )

    def _failed(self, step: int, why: str) -> None:
        self._warn(f"no checkpoint of step {step}: {why}")
        self._events.tell("checkpoint_failed", step=step, message=why)

    def _moved(self) -> None:
        self._moved_at = time.monotonic()
