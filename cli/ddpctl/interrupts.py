"""What Ctrl-C, SIGTERM and SIGHUP do: an exception in a verb; outside one ddpctl exits without a message.

Imports almost nothing, so that the handler is set before the imports that take time.
"""

import os
import signal
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143  # as ddpwire.exits.Exit, which would have to be imported first
_ENDS = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: what handles Ctrl-C handles them. Raised once; those that follow are skipped."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def exit_silently() -> None:
    """From now on Ctrl-C ends the process at once, unless its parent has SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)
    for number in _ENDS:
        if signal.getsignal(number) is _terminate:
            signal.signal(number, signal.SIG_DFL)


def raise_in_verb() -> None:
    """A verb begins: from now on they are exceptions, so that the verb can report what it leaves."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _ENDS:
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has SIGHUP ignored
            signal.signal(number, _terminate)


def code_of(error: KeyboardInterrupt) -> int:
    """The exit code of a verb that it has ended."""
    return TERMINATED if isinstance(error, Terminated) else INTERRUPTED


def _exit(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def _terminate(number: int, _frame: FrameType | None) -> None:
    for end in _ENDS:
        if signal.getsignal(end) is _terminate:
            signal.signal(end, _pass_over)
    from ddpwire.streams import leave_lost

    leave_lost()  # the terminal may be gone, and a message would be an error
    raise Terminated(number)


def _pass_over(_number: int, _frame: FrameType | None) -> None:
    """A handler, unlike SIG_IGN, is not inherited."""
