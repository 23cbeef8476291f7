"""The error of the trainer: a code, a message, a hint and fields."""

from collections.abc import Mapping
from typing import Any

from ddpwire.exits import Exit


class TrainError(Exception):
    """An error that ends the training with one line, ``str(error)``: ``message``, and ``hint`` if there is one.

    ``rank`` prints the line; None: every rank that raises it does, for errors before the ranks have met. ``fields`` are
    the facts in the message, for code that must act on them, since no code parses the message. They must be picklable,
    since an error of one rank is raised on all.
    """

    def __init__(self, code: Exit, message: str, *, hint: str = "", rank: int | None = 0, **fields: Any) -> None:
        super().__init__(f"{message}: {hint}" if hint else message)
        self.code = code
        self.message = message
        self.hint = hint
        self.rank = rank
        self.fields: Mapping[str, Any] = fields


def config_error(message: str, *, hint: str = "", rank: int | None = 0, **fields: Any) -> TrainError:
    """Return the error for options that contradict each other, the machine or the data."""
    return TrainError(Exit.CONFIG, message, hint=hint, rank=rank, **fields)
