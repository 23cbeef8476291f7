"""The error type of the trainer, with a code, a message, a hint and fields, and the messages on stderr."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ddpwire.exits import Exit


class TrainError(Exception):
    """An error that ends the training. It is printed as one line: ``message``, then ``hint`` if there is one.

    ``rank`` is the only rank that prints the line. ``rank`` is None if a rank raises the error on its own, for example
    before the ranks have met. Then every rank that raises the error prints the line.
    """

    def __init__(self, code: Exit, message: str, *, hint: str = "", rank: int | None = 0) -> None:
        super().__init__(f"{message}: {hint}" if hint else message)
        self.code, self.rank = code, rank


def config_error(message: str, *, hint: str = "", rank: int | None = 0) -> TrainError:
    """Return the error for options that contradict each other or do not suit the machine or the data."""
    return TrainError(Exit.CONFIG, message, hint=hint, rank=rank)


@contextmanager
def os_errors(code: Exit, message: str, *, hint: str = "") -> Iterator[None]:
    """Raise TrainError if the ``with`` block raises OSError. The system's reason is added to ``message``."""
    try:
        yield
    except OSError as error:
        raise TrainError(code, f"{message}: {error.strerror or error}", hint=hint) from error


def log_error(message: str) -> None:
    """Print a line on stderr."""
    print(f"ddptrain: {message}", file=sys.stderr, flush=True)


def log_warning(message: str) -> None:
    """Print a warning on stderr."""
    log_error(f"warning: {message}")
