"""Make sure that the descriptors 0 to 2 are open, as other code assumes.

If the parent process has closed one of them, the next file that is opened gets its number, and printed text goes into
that file. ``leave_lost`` is for a terminal that is closed later.
"""

import os
import select
import sys


def open_closed() -> None:
    """Open /dev/null on each of the descriptors 0 to 2 that is closed. Call this before any other file is opened."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def leave_lost() -> None:
    """Redirect stdout and stderr to /dev/null, each only if its terminal or reader no longer exists."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    for descriptor, event in poll.poll(0):
        if event & (select.POLLHUP | select.POLLERR):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
