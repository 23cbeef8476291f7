"""Standard streams that are really there: a daemon's starter may have closed them, and the next file would take their
numbers, and get what is printed. Standard library only.
"""

import os
import sys


def open_closed() -> None:
    """Give a process its streams 0 to 2: those that are closed lead nowhere. Before anything else is opened."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
