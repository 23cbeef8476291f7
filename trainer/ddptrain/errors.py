"""The error type of the trainer, with a code, a message, a hint and fields."""

from collections.abc import Mapping
from typing import Any

from ddpwire.exits import Exit


class TrainError(Exception):
    """An error that ends the training. It is printed as one line: ``message``, then ``hint`` if there is one.

    ``rank`` is the only rank that prints the line. ``rank`` is None if a rank raises the error on its own, for example
    before the ranks have met. Then every rank that raises the error prints the line. ``fields`` are the values in the
    message, for code that uses them. They must be picklable, because an error of one rank is raised on all ranks.
    """

    def __init__(self, code: Exit, message: str, *, hint: str = "", rank: int | None = 0, **fields: Any) -> None:
        super().__init__(f"{message}: {hint}" if hint else message)
        self.code = code
        self.message = message
        self.hint = hint
        self.rank = rank
        self.fields: Mapping[str, Any] = fields


def config_error(message: str, *, hint: str = "", rank: int | None = 0, **fields: Any) -> TrainError:
    """Return the error for options that contradict each other or do not suit the machine or the data."""
    return TrainError(Exit.CONFIG, message, hint=hint, rank=rank, **fields)
