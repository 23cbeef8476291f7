"""The error classes, each with its exit code (ddpwire.exits). An error is data; main.py makes a line of it.

DdpctlError            70
├── UsageError          2   a command line that makes no sense
├── ConfigError        78   a job that this target cannot run
│   └── FileError      78   a ddpctl.yaml: a line for each error, with file, line and column
├── NoInputError       66   a script, a file or a run that is not there
├── UnavailableError   69   a machine, a port, a program or a library that cannot be had
├── CannotWriteError   73   disk full, folder read-only
└── NotStartedError         a failed launch that left no process anywhere; it has the exit code of its cause
"""

from ddpwire.exits import Exit


class DdpctlError(Exception):
    """A fault of ours, and the root of all that ddpctl raises on purpose.

    The message is one line: what is wrong, the value given, what is allowed; the hint, which may be empty, is what to
    do next. ``str`` is both. An empty message: whoever it happened to has said it already. The fields are for who
    handles the error: no logic reads a message.
    """

    code: int = Exit.SOFTWARE  # ddpctl's exit code
    prefix: str = "ddpctl: "  # what stands before the text on a terminal

    def __init__(self, message: str, *, hint: str = "", **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.fields = fields

    def __str__(self) -> str:
        return f"{self.message}: {self.hint}" if self.hint else self.message


class UsageError(DdpctlError):
    """A command line that makes no sense."""

    code = Exit.USAGE


class ConfigError(DdpctlError):
    """A job that its target cannot run."""

    code = Exit.CONFIG


class FileError(ConfigError):
    """A ddpctl.yaml that is wrong: a line for each error, which names file, line and column as compilers do."""

    prefix = ""


class NoInputError(DdpctlError):
    """A script, a file or a run that is not there."""

    code = Exit.NO_INPUT


class UnavailableError(DdpctlError):
    """A machine, a port, a program or a library that cannot be had."""

    code = Exit.UNAVAILABLE


class CannotWriteError(DdpctlError):
    """A folder or a disk that takes no file."""

    code = Exit.CANNOT_WRITE


class NotStartedError(DdpctlError):
    """What a target's ``submit`` raises where it has left no process anywhere, so that there is nothing to stop."""

    def __init__(self, reason: DdpctlError) -> None:
        super().__init__(reason.message, hint=reason.hint, **reason.fields)
        self.code, self.prefix = reason.code, reason.prefix
        self.reason = reason
