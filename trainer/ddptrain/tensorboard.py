"""Scalars for TensorBoard, an epoch at a time. Imports tensorboard only where it was asked for; rank 0 alone."""

from pathlib import Path
from typing import Any

from ddptrain.errors import TrainError
from ddptrain.place import Place
from ddpwire.exits import Exit


class Board:
    """What is written; here, to nowhere."""

    def epoch(self, *, step: int, loss: float, accuracy: float, lr: float, images_per_s: float) -> None:
        """An epoch ended after ``step`` steps."""


class Written(Board):
    """A folder of event files. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def epoch(self, *, step: int, loss: float, accuracy: float, lr: float, images_per_s: float) -> None:
        """An epoch ended after ``step`` steps."""
        values = {"train/loss": loss, "test/accuracy": accuracy, "train/lr": lr, "train/images_per_s": images_per_s}
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


def open_board(folder: Path | None, place: Place) -> Board:
    """The one that ``--tensorboard`` names. Raises TrainError."""
    if folder is None or not place.first:
        return Board()
    try:
        return Written(folder)
    except ImportError:
        raise TrainError(
            Exit.NO_INPUT, "--tensorboard needs tensorboard, which is not installed: pip install 'ddpctl[tensorboard]'"
        ) from None
    except OSError as error:
        raise TrainError(Exit.CANNOT_WRITE, f"--tensorboard {folder} cannot be written: {error.strerror}") from None
