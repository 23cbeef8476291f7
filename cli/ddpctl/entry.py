"""Where the program begins. Ctrl-C ends it without a word until a verb has begun, and after its end: there is nothing
to say yet, and nothing any more. This module imports next to nothing, so that it comes before what takes time.
"""

import os
import signal
from types import FrameType

INTERRUPTED = 130  # ddpwire.exits.Exit.INTERRUPTED, which would have to be imported first


def main() -> None:
    """The console script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else its starter has it ignored
        signal.signal(signal.SIGINT, _leave)
    from ddpctl.main import main as run

    run()


def verb_begins() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt: a verb says what it leaves."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def verb_is_over() -> None:
    """Python's own end takes a moment, too."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
