"""The error classes. Each class has an exit code (ddpwire.exits), and main.py prints an error as one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from ddpwire.exits import Exit


class DdpctlError(Exception):
    """The base class of ddpctl's errors. The class itself is used for an internal error of ddpctl.

    The message is one line with the cause, the given value, and the allowed values. It is empty if the error was
    already reported. The hint says what the user can do. ``fields`` has values for the code that handles the error,
    such as the number of GPUs that were found.
    """

    code: int = Exit.SOFTWARE  # ddpctl's exit code
    prefix: str = "ddpctl: "  # printed before the text on a terminal

    def __init__(self, message: str, *, hint: str = "", **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.fields = fields

    def __str__(self) -> str:
        return f"{self.message}: {self.hint}" if self.hint else self.message


class UsageError(DdpctlError):
    """The command line is invalid."""

    code = Exit.USAGE


class ConfigError(DdpctlError):
    """The target cannot run this job."""

    code = Exit.CONFIG


class FileError(ConfigError):
    """The file ddpctl.yaml is invalid. The message has one line per error, with file, line and column."""

    prefix = ""


class NoInputError(DdpctlError):
    """A script, a file or a run does not exist."""

    code = Exit.NO_INPUT


class UnavailableError(DdpctlError):
    """A machine, a port, a program or a library is not available."""

    code = Exit.UNAVAILABLE


class CannotWriteError(DdpctlError):
    """A folder or a disk cannot be written to."""

    code = Exit.CANNOT_WRITE


@contextmanager
def writing(path: object, verb: str = "write") -> Iterator[None]:
    """Convert an OSError in the ``with`` block to a CannotWriteError. ``verb`` is that of its message."""
    try:
        yield
    except OSError as error:
        raise CannotWriteError(f"cannot {verb} {path}: {error.strerror}") from None
