"""The keyboard of a screen that refreshes: waits, and hears q or Ctrl-C meanwhile. Without a terminal it only waits."""

import contextlib
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Keys come one by one and are not shown, as long as this lasts."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def quits_within(seconds: float) -> bool:
    """Whether q is pressed in that time; any other key ends the wait."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and sys.stdin.read(1) in ("q", "Q", "")
