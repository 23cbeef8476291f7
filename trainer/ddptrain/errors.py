"""The error of the trainer: a code, a message, a hint and fields."""

from collections.abc import Mapping
from typing import Any

from ddpwire.exits import Exit


class TrainError(Exception):
    """An error that ends the training with one line, ``str(error)``: ``message``, and ``hint`` where there is one.

    ``rank`` is the one that prints the line; None: every rank that raises it, for errors before the ranks have met.
    ``fields`` are the facts in the message, for whoever must act on them: no code reads the message. They are values
    that pickle, since an error of one rank is raised on all.
    """

    def __init__(self, code: Exit, message: str, *, hint: str = "", rank: int | None = 0, **fields: Any) -> None:
        super().__init__(f"{message}: {hint}" if hint else message)
        self.code = code
        self.message = message
        self.hint = hint
        self.rank = rank
        self.fields: Mapping[str, Any] = fields
