"""The one error of the trainer: a line for a person and the code to exit with."""

from ddpwire.exits import Exit


class TrainError(Exception):
    """What ends a training with one line.

    ``rank`` is the one that prints the line; None: every rank that sees it, for errors that come before ranks can talk.
    """

    def __init__(self, code: Exit, message: str, *, rank: int | None = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.rank = rank
