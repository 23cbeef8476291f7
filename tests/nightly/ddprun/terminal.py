"""A program in a pseudo-terminal, as a person at a keyboard uses it."""

import fcntl
import os
import pty
import select
import struct
import termios
import time
from collections.abc import Sequence

SIZE = struct.Struct("HHHH")


class Session:
    """A program that was started in a terminal of its own."""

    def __init__(self, argv: Sequence[str], *, rows: int = 24, columns: int = 80) -> None:
        self.shown, self.everything = "", ""  # what no call has waited for yet, and all that was shown
        self._pid, self._terminal = pty.fork()
        if not self._pid:
            fcntl.ioctl(0, termios.TIOCSWINSZ, SIZE.pack(rows, columns, 0, 0))
            os.execve(argv[0], argv, os.environ)  # noqa: S606 (readline sets COLUMNS behind os.environ)
        os.set_inheritable(self._terminal, False)  # else a later session holds it open

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Read until ``text`` is on the screen, after what earlier calls have waited for."""
        deadline = time.monotonic() + timeout_s
        while text not in self.shown:
            assert self._read(deadline), f"{text!r} was not shown: {self.shown}"
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        """Type it; the terminal's line discipline turns \\x03 into SIGINT."""
        os.write(self._terminal, text.encode())

    def resize(self, *, rows: int, columns: int) -> None:
        """Change the size of the window."""
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, SIZE.pack(rows, columns, 0, 0))

    def close(self) -> None:
        """Close the window: the program gets SIGHUP."""
        os.close(self._terminal)
        os.waitpid(self._pid, 0)

    def end(self, timeout_s: float = 60.0) -> int:
        """Return the exit code, once the program has ended."""
        deadline = time.monotonic() + timeout_s
        while self._read(deadline):
            pass
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _read(self, deadline: float) -> bool:
        """Read what is shown. False: the program has closed the terminal."""
        ready, _, _ = select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing more was shown: {self.shown}"
        try:
            data = os.read(self._terminal, 4096)
        except OSError:
            return False
        text = data.decode(errors="replace").replace("\r\n", "\n")
        self.shown += text
        self.everything += text
        return bool(data)
