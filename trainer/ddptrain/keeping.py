"""A job's way onto the shelf and back: rank 0 reads and writes, all ranks agree on what came of it."""

import sys
from collections.abc import Callable
from pathlib import Path

from ddptrain.checkpoint import Checkpoint
from ddptrain.errors import TrainError
from ddptrain.job import Job
from ddptrain.ledger import Ledger
from ddptrain.metrics import Metrics
from ddptrain.options import shaping
from ddptrain.resume import Finder
from ddptrain.saver import STUCK_S, Saver
from ddptrain.shelf import Shelf
from ddptrain.world import agree, broadcast
from ddpwire.events import EventLog
from ddpwire.exits import Exit


class Keeping:
    """The checkpoints of one job. ``shelf`` is None on all ranks but 0."""

    def __init__(
        self,
        job: Job,
        shelf: Shelf | None,
        metrics: Metrics,
        ledger: Ledger,
        events: EventLog,
        *,
        alive: Callable[[int], None],
    ) -> None:
        self._job = job
        self._shaping = shaping(job.options, batch_size=job.batch_size)
        self._epochs = job.options.training.epochs
        self._resumed: Path | None = None
        self._ledger = ledger
        self._events = events
        self._finder: Finder | None = None
        self._saver: Saver | None = None
        how = job.options.checkpoints
        if shelf is not None:
            self._finder = Finder(shelf=shelf, options=how, metrics=metrics, warn=warn)
            self._saver = Saver(shelf, how, metrics, events=events, warn=warn, alive=alive)
            self._path = shelf.path

    def resume(self) -> tuple[Path, int, int | None] | None:
        """Load what ``--resume`` says on every rank; None: nothing.

        Its file, the number of steps that are done, and the epochs that it was to be long (None: it does not say).

        Raises TrainError.
        """
        place = self._job.world.place
        with self._ledger.lost("restore"):
            found = broadcast(place, agree(place, self._find))
            if found is None and not self._epochs and not self._job.options.model.pretrained:
                raise TrainError(
                    Exit.NO_INPUT,
                    f"--epochs 0 only evaluates, and {self._job.options.checkpoints.folder} holds no checkpoint: "
                    "give --resume FILE, another --checkpoint-dir, or --pretrained FILE",
                )
            if found is None:
                return None
            path, checkpoint = found
            self._resumed = path
            agree(place, lambda: self._take_over(path, checkpoint))
            if self._saver:
                self._saver.newest = path
        self._events.tell(
            "checkpoint_loaded", step=checkpoint.step, seconds=self._ledger.lost_s["restore"], path=str(path)
        )
        return path, checkpoint.step, checkpoint.shaping.get("epochs")

    def due(self, step: int) -> bool:
        """Whether to save after this step, in the middle of an epoch. Only rank 0 knows."""
        return self._saver is not None and self._saver.due(step)

    def save(self, step: int, accuracy: float | None) -> None:
        """Have rank 0 write a checkpoint, unless there is one of this step. The others need not wait."""
        if self._saver and self._saver.newest != self._path(step):
            with self._ledger.lost("checkpoint"):
                parts = {name: part.state_dict() for name, part in self._job.parts.items()}
                # The epochs shape the learning rate; they are kept to be told, and may be changed.
                self._saver.save(step, parts, {**self._shaping, "epochs": self._epochs}, accuracy)

    def finish(self, step: int, accuracy: float | None) -> Path | None:
        """See to it that the last step is on the disk; its file. Raises TrainError when it cannot be.

        Where nothing was to be trained nothing is written.
        """
        if not self._epochs:
            return self._resumed
        problem, path = "", Path()
        if self._saver:
            path = self._path(step)
            settled = self.settle(step)
            if settled and self._saver.newest != path:  # not begun, or the disk has room again
                self.save(step, accuracy)
                settled = self.settle(step)
            if not settled:
                problem = f"step {step} could not be saved: the disk has not taken {path} for {STUCK_S:g} s"
            elif self._saver.newest != path:
                problem = f"step {step} could not be saved as {path}; the one before it is whole"
        problem, path = broadcast(self._job.world.place, (problem, path))
        if problem:
            raise TrainError(Exit.CANNOT_WRITE, problem)
        return path

    def settle(self, step: int | None = None) -> bool:
        """Wait until what is being written is on the disk; False: the disk is stuck."""
        with self._ledger.lost("checkpoint"):
            return self._saver is None or self._saver.settle(step)

    def _find(self) -> tuple[Path, Checkpoint] | None:
        return self._finder.find(self._shaping) if self._finder else None

    def _take_over(self, path: Path, checkpoint: Checkpoint) -> None:
        try:
            for name, part in self._job.parts.items():
                part.load_state_dict(checkpoint.parts[name])
        except (KeyError, RuntimeError, ValueError) as error:
            told = f"it has no {error.args[0]!r}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise TrainError(Exit.CONFIG, f"{path} does not fit this training: {told}") from None


def warn(message: str) -> None:
    """A line about a checkpoint that is no reason to stop."""
    print(f"ddptrain: warning: {message}", file=sys.stderr, flush=True)
