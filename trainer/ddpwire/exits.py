"""The exit codes of all three programs: sysexits(3) and 128 + signal, nothing invented.

Below 128 another run is not worth it; from 128 on it may be, and 130 never is. A script's own
exit code is passed on as it is.
"""

from enum import IntEnum


class Exit(IntEnum):
    """What the number says; ``Exit(78).name`` is ``CONFIG``."""

    OK = 0
    SCRIPT = 1  # the user's script failed and said no more
    USAGE = 2  # a command line that makes no sense (Typer's and argparse's own)
    DATA = 65  # a data set, or every checkpoint, is corrupt; or a loss is no number
    NO_INPUT = 66  # a file or a data set is missing
    UNAVAILABLE = 69  # a host, a port or a service cannot be reached or had
    SOFTWARE = 70  # a fault of ours
    CANNOT_WRITE = 73  # disk full, folder read-only
    GAVE_UP = 75  # three attempts without progress
    CONFIG = 78  # configuration, or nodes that do not match
    INTERRUPTED = 130  # Ctrl-C
    KILLED = 137  # SIGKILL: killed, or out of memory, or a node was lost
    SAVED_USR1 = 138  # saved on SIGUSR1
    ABSENT = 142  # the others did not come in time
    SAVED_TERM = 143  # saved on SIGTERM
    HUNG = 144  # a rank hung and was killed


def of_status(returncode: int) -> int:
    """The shell's code of a ``subprocess`` return code: -9 is 137, 3 is 3."""
    return 128 - returncode if returncode < 0 else returncode


def worth_a_retry(code: int) -> bool:
    """Whether starting the same run again may help."""
    return code >= 128 and code != Exit.INTERRUPTED
