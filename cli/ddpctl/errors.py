"""The tree of errors, each with its exit code (ddpwire.exits). A message is one line.

DdpctlError            70
├── UsageError          2   a command line that makes no sense
├── ConfigError        78   a job that this target cannot run
│   └── FileError      78   a ddpctl.yaml: a line for each error, with file, line and column
├── NoInputError       66   a script, a file or a run that is not there
├── UnavailableError   69   a machine, a port, a program or a library that cannot be had
└── CannotWriteError   73   disk full, folder read-only
"""

from typing import ClassVar

from ddpwire.exits import Exit


class DdpctlError(Exception):
    """A fault of ours, and the root of all that ddpctl raises on purpose.

    The text is one line: what is wrong, the value given, what is allowed, what to do next. An empty one: whoever it
    happened to has said it already.
    """

    exit_code: ClassVar[int] = Exit.SOFTWARE
    prefix: ClassVar[str] = "ddpctl: "  # what stands before the text on a terminal
    nothing_started: bool = False  # a launch that raises it has left no process anywhere


class UsageError(DdpctlError):
    """A command line that makes no sense."""

    exit_code = Exit.USAGE


class ConfigError(DdpctlError):
    """A job that its target cannot run."""

    exit_code = Exit.CONFIG


class FileError(ConfigError):
    """A ddpctl.yaml that is wrong: a line for each error, which names file, line and column as compilers do."""

    prefix = ""


class NoInputError(DdpctlError):
    """A script, a file or a run that is not there."""

    exit_code = Exit.NO_INPUT


class UnavailableError(DdpctlError):
    """A machine, a port, a program or a library that cannot be had."""

    exit_code = Exit.UNAVAILABLE


class CannotWriteError(DdpctlError):
    """A folder or a disk that takes no file."""

    exit_code = Exit.CANNOT_WRITE
