"""The stdin, stdout and stderr of a rank if those of ddprun are a terminal.

ddprun reads a rank's output and writes it to the rank's log. So the rank's stdout and stderr are a pseudo-terminal with
the same size and modes as the terminal. A rank's stdin is the terminal itself.
"""

import fcntl
import os
import pty
import struct
import termios
from contextlib import suppress

SIZE = struct.Struct("HHHH")  # rows, columns, and the size in pixels (tty_ioctl(4))
OUTPUT_FLAGS = 1  # their index in the result of termios.tcgetattr


def open_pair(like: int) -> tuple[int, int]:
    """Open a pseudo-terminal. Return ddprun's end and the rank's end.

    If ``like`` is not a terminal, or no pseudo-terminal can be opened, open a pipe instead.
    """
    if os.isatty(like):
        with suppress(OSError, termios.error):  # no more pseudo-terminals, or no /dev/pts
            modes = termios.tcgetattr(like)
            modes[OUTPUT_FLAGS] &= ~termios.OPOST  # the terminal itself turns "\n" into "\r\n"
            read, write = pty.openpty()
            termios.tcsetattr(write, termios.TCSANOW, modes)
            copy_size(like, read)
            return read, write
    return os.pipe()


def copy_size(source: int, target: int) -> None:
    """Give ``target`` the size of ``source``. Do nothing if one of the two is not a terminal."""
    with suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(SIZE.size))
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)


class TerminalModes:
    """The modes of ddprun's terminal, which a rank may have changed, for example with a line editor."""

    def __init__(self) -> None:
        self._modes = None
        with suppress(termios.error):
            self._modes = termios.tcgetattr(0)

    def restore(self) -> None:
        """Restore the terminal's original modes, unless ddprun runs in the background."""
        if self._modes and _in_foreground():
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(0, termios.TCSADRAIN, self._modes)


def open_stdin(*, own: bool) -> int:
    """Return ddprun's stdin if ``own`` is set and ddprun is not a background job. Otherwise return /dev/null."""
    # In the background, the kernel would let the rank read what is typed for the shell: the rank has its own session.
    if own and _in_foreground():
        return os.dup(0)
    return os.open(os.devnull, os.O_RDONLY)


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return True  # stdin is no terminal, or not the one that controls this session
