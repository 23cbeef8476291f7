"""The exit codes of all three programs: sysexits(3) and 128 + signal, nothing invented.

Below 128 another run is not worth it; from 128 on it may be, and 130 never is. A script's own
exit code is passed on as it is.
"""

from enum import IntEnum


class Exit(IntEnum):
    """What the number says; ``Exit(78).name`` is ``CONFIG``."""

    @property
    def retry(self) -> bool:
        """Whether starting the same run again may help."""
        return worth_a_retry(self)

    @property
    def meaning(self) -> str:
        """What happened, in half a sentence; empty for 0 and for 2, which many scripts use for other things."""
        return _MEANINGS.get(self, "")

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


_MEANINGS = {
    Exit.SCRIPT: "the script failed",
    Exit.DATA: "a data set or every checkpoint is corrupt",
    Exit.NO_INPUT: "a file is missing",
    Exit.UNAVAILABLE: "a host, a port or a service could not be reached",
    Exit.SOFTWARE: "it failed with an unexpected error",
    Exit.CANNOT_WRITE: "the disk is full or read-only",
    Exit.GAVE_UP: "it gave up after three attempts without progress",
    Exit.CONFIG: "its configuration is wrong",
    Exit.KILLED: "it was killed",
    Exit.INTERRUPTED: "it was interrupted",
    Exit.SAVED_USR1: "it saved on SIGUSR1, and ended",
    Exit.ABSENT: "the other nodes did not come in time",
    Exit.SAVED_TERM: "it was asked to stop, and saved",
    Exit.HUNG: "a rank hung",
}


def of_status(returncode: int) -> int:
    """The shell's code of a ``subprocess`` return code: -9 is 137, 3 is 3."""
    return 128 - returncode if returncode < 0 else returncode


def worth_a_retry(code: int) -> bool:
    """Whether starting the same run again may help."""
    return code >= 128 and code != Exit.INTERRUPTED
