"""The exit codes of all three programs: those of sysexits(3), and 128 + signal.

Starting the same run again does not help after a code below 128 or after 130. After the other codes it may help.
ddprun and ddpctl return a script's own exit code unchanged.
"""

from enum import IntEnum
from typing import Self


class Exit(IntEnum):
    """The exit codes by name, each with its meaning: ``Exit(78).name`` is ``CONFIG``.

    A message contains the meaning as a part of a sentence. The meaning is empty for 0. It is also empty for 2, because
    many scripts use this code for other purposes.
    """

    meaning: str

    def __new__(cls, code: int, meaning: str = "") -> Self:
        """Make a member whose value is the code."""
        member = int.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member

    @property
    def retry(self) -> bool:
        """Whether starting the same run again may help."""
        return worth_a_retry(self)

    OK = 0
    SCRIPT = 1, "the script failed"  # without a more specific code
    USAGE = 2  # an invalid command line (the code of Typer and argparse)
    DATA = 65, "a data set or every checkpoint is corrupt"  # also: a loss is not finite
    NO_INPUT = 66, "a file is missing"
    UNAVAILABLE = 69, "a host, a port or a service could not be reached"
    SOFTWARE = 70, "it failed with an unexpected error"  # a bug in one of the three programs
    CANNOT_WRITE = 73, "the disk is full or read-only"
    GAVE_UP = 75, "it gave up, because restarts did not help"
    CONFIG = 78, "its configuration is wrong"  # also: the nodes do not match
    INTERRUPTED = 130, "it was interrupted"  # Ctrl-C
    KILLED = 137, "it was killed"  # SIGKILL; also: out of memory, a node was lost
    SAVED_USR1 = 138, "it was asked to stop with SIGUSR1"
    SAVED_USR2 = 140, "it was asked to stop with SIGUSR2"
    ABSENT = 142, "the other nodes did not come in time"
    SAVED_TERM = 143, "it was asked to stop"
    HUNG = 144, "a rank hung"


# The exit codes of a rank that ended because of a stop signal, whether it saved or not.
STOPPED = frozenset({Exit.INTERRUPTED, Exit.SAVED_USR1, Exit.SAVED_USR2, Exit.SAVED_TERM})


def of_status(returncode: int) -> int:
    """Return the shell's exit code for a ``subprocess`` return code: 137 for -9, 3 for 3."""
    return 128 - returncode if returncode < 0 else returncode


def worth_a_retry(code: int) -> bool:
    """Return whether starting the same run again may help after an exit with ``code``."""
    return code >= 128 and code != Exit.INTERRUPTED
