"""What a rank gets for its stdin, stdout and stderr where ddprun's own are a terminal.

A rank's output is read by ddprun, which keeps it in the rank's log: so in place of a terminal the rank gets a
pseudo-terminal with the same size and modes. It reads from the terminal itself.
"""

import fcntl
import os
import pty
import struct
import termios
from contextlib import suppress

SIZE = struct.Struct("HHHH")  # rows, columns, and the size in pixels (tty_ioctl(4))
OUTPUT_FLAGS = 1  # where termios.tcgetattr has them


def open_pair(like: int) -> tuple[int, int]:
    """Return where ddprun reads and the rank writes: a pseudo-terminal where ``like`` is a terminal, else a pipe."""
    if os.isatty(like):
        with suppress(OSError, termios.error):  # there is no more of them, or no /dev/pts
            return _open_terminal(like)
    return os.pipe()


def _open_terminal(like: int) -> tuple[int, int]:
    modes = termios.tcgetattr(like)
    modes[OUTPUT_FLAGS] &= ~termios.OPOST  # the terminal itself makes "\r\n" of "\n"
    read, write = pty.openpty()
    termios.tcsetattr(write, termios.TCSANOW, modes)
    copy_size(like, read)
    return read, write


def copy_size(source: int, target: int) -> None:
    """Give a terminal the size of another one; do nothing if one of the two is none."""
    with suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(SIZE.size))
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)


class TerminalModes:
    """The modes of ddprun's own terminal; a rank that is killed at a prompt leaves those of its line editor."""

    def __init__(self) -> None:
        self._modes = None
        with suppress(termios.error):
            self._modes = termios.tcgetattr(0)

    def restore(self) -> None:
        """Give the terminal the modes that it had at first, unless ddprun is in its background."""
        if self._modes and _in_foreground():
            with suppress(termios.error):  # it is gone
                termios.tcsetattr(0, termios.TCSADRAIN, self._modes)


def open_stdin(*, own: bool) -> int:
    """Return a rank's stdin: ddprun's ``own``, unless that is a terminal in whose background ddprun is; else nothing.

    A rank has a session of its own, so the kernel does not stop it when it reads from a terminal that a shell reads.
    """
    if own and _in_foreground():
        return os.dup(0)
    return os.open(os.devnull, os.O_RDONLY)


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return True  # it is no terminal, or not the one that controls this session
