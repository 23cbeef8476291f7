"""Handles Ctrl-C, SIGTERM and SIGHUP. During a subcommand, they raise an exception. At other times, they end ddpctl.

This module has few imports, so that the handlers are installed before slow imports.
"""

import os
import signal
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143  # as in ddpwire.exits.Exit, which is not imported yet
_ENDS = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP was received. Only the first such signal raises this exception."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def exit_silently() -> None:
    """From now on, Ctrl-C, SIGTERM and SIGHUP end the process at once. Signals that are ignored stay ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)
    for number in _ENDS:
        if signal.getsignal(number) is _terminate:
            signal.signal(number, signal.SIG_DFL)


def raise_in_verb() -> None:
    """From now on, Ctrl-C, SIGTERM and SIGHUP raise an exception. Signals that are ignored stay ignored."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _ENDS:
        if signal.getsignal(number) is signal.SIG_DFL:  # not if ignored, as under nohup
            signal.signal(number, _terminate)


def code_of(error: KeyboardInterrupt) -> int:
    """Return the exit code of a subcommand that was ended by ``error``."""
    return TERMINATED if isinstance(error, Terminated) else INTERRUPTED


def _exit(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def _terminate(number: int, _frame: FrameType | None) -> None:
    for end in _ENDS:
        if signal.getsignal(end) is _terminate:
            signal.signal(end, lambda *_: None)  # unlike SIG_IGN, not inherited by child processes
    from ddpwire.streams import leave_lost

    leave_lost()  # the terminal may be gone, and a message would then fail
    raise Terminated(number)
