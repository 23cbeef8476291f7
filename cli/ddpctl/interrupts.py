"""Handles Ctrl-C, SIGTERM and SIGHUP: while a subcommand runs, they raise an exception; otherwise they end ddpctl.

This module imports almost nothing, so that the handlers are installed before slow imports.
"""

import os
import signal
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143  # as in ddpwire.exits.Exit, which is not imported yet
_ENDS = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP was received. It is handled like Ctrl-C, and raised once: later signals are ignored."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def exit_silently() -> None:
    """From now on, end the process at once on Ctrl-C, SIGTERM and SIGHUP, unless its parent made it ignore them."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)
    for number in _ENDS:
        if signal.getsignal(number) is _terminate:
            signal.signal(number, signal.SIG_DFL)


def raise_in_verb() -> None:
    """From now on, raise exceptions on Ctrl-C, SIGTERM and SIGHUP, so that a subcommand can report what it leaves."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _ENDS:
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup makes us ignore SIGHUP
            signal.signal(number, _terminate)


def code_of(error: KeyboardInterrupt) -> int:
    """Return the exit code of a subcommand that this exception has ended."""
    return TERMINATED if isinstance(error, Terminated) else INTERRUPTED


def _exit(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def _terminate(number: int, _frame: FrameType | None) -> None:
    for end in _ENDS:
        if signal.getsignal(end) is _terminate:
            signal.signal(end, _pass_over)
    from ddpwire.streams import leave_lost

    leave_lost()  # the terminal may be gone, and a message would then fail
    raise Terminated(number)


def _pass_over(_number: int, _frame: FrameType | None) -> None:
    """Ignore a signal. Unlike SIG_IGN, this handler is not inherited by child processes."""
