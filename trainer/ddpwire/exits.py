"""The exit codes of all three programs: those of sysexits(3), and 128 + signal.

Starting the same run again does not help after a code below 128 or after 130. After the other codes it may help.
ddprun and ddpctl return a script's own exit code unchanged.
"""

from enum import IntEnum


class Exit(IntEnum):
    """The exit codes by name: ``Exit(78).name`` is ``CONFIG``."""

    @property
    def retry(self) -> bool:
        """Whether starting the same run again may help."""
        return worth_a_retry(self)

    @property
    def meaning(self) -> str:
        """What happened, as part of a sentence; empty for 0, and for 2, which many scripts use for other purposes."""
        return _MEANINGS.get(self, "")

    OK = 0
    SCRIPT = 1  # the user's script failed without a more specific code
    USAGE = 2  # an invalid command line (the code of Typer and argparse)
    DATA = 65  # a data set, or every checkpoint, is corrupt; or a loss is not finite
    NO_INPUT = 66  # a file or a data set is missing
    UNAVAILABLE = 69  # a host, a port or a service cannot be reached or used
    SOFTWARE = 70  # a bug in one of the three programs
    CANNOT_WRITE = 73  # the disk is full, or a folder is read-only
    GAVE_UP = 75  # three attempts without progress
    CONFIG = 78  # the configuration is wrong, or the nodes do not match
    INTERRUPTED = 130  # Ctrl-C
    KILLED = 137  # SIGKILL: killed, or out of memory, or a node was lost
    SAVED_USR1 = 138  # saved on SIGUSR1
    ABSENT = 142  # the other nodes did not come in time
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
    """Return the shell's exit code for a ``subprocess`` return code: 137 for -9, 3 for 3."""
    return 128 - returncode if returncode < 0 else returncode


def worth_a_retry(code: int) -> bool:
    """Return whether starting the same run again may help after an exit with ``code``."""
    return code >= 128 and code != Exit.INTERRUPTED
