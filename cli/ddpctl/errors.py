"""The error classes, each with its exit code (ddpwire.exits). An error is data; main.py turns it into one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from ddpwire.exits import Exit


class DdpctlError(Exception):
    """The base class of all errors that ddpctl raises on purpose. This class itself is for defects of ddpctl.

    The message is one line: what is wrong, the given value, and what is allowed. It is empty if the error was already
    reported. The hint is what to do next, or empty. ``str`` joins message and hint. The fields are for code that
    handles the error, because no logic reads a message.
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
    """The command line makes no sense."""

    code = Exit.USAGE


class ConfigError(DdpctlError):
    """The target cannot run this job."""

    code = Exit.CONFIG


class FileError(ConfigError):
    """The ddpctl.yaml has errors; the message has one line per error, with file, line and column."""

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


class NotStartedError(DdpctlError):
    """A launch failed and left no process on any machine, so there is nothing to stop. A target's ``submit`` raises it.

    Its exit code is that of ``reason``.
    """

    def __init__(self, reason: DdpctlError) -> None:
        super().__init__(reason.message, hint=reason.hint, **reason.fields)
        self.code, self.prefix = reason.code, reason.prefix
        self.reason = reason


@contextmanager
def writing(path: object, what: str = "write") -> Iterator[None]:
    """Turn an OSError in the ``with`` block into CannotWriteError. ``what`` names the action in its message."""
    try:
        yield
    except OSError as error:
        raise CannotWriteError(f"cannot {what} {path}: {error.strerror}") from None
