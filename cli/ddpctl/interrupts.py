"""What Ctrl-C does: before a verb begins and after it ends, ddpctl exits without a message.

Imports almost nothing, so that the handler is set before the imports that take time.
"""

import os
import signal
from types import FrameType

INTERRUPTED = 130  # ddpwire.exits.Exit.INTERRUPTED, which would have to be imported first


def exit_silently() -> None:
    """From now on Ctrl-C ends the process at once, unless its parent has SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_in_verb() -> None:
    """A verb begins: from now on Ctrl-C is a KeyboardInterrupt, so that the verb can report what it leaves."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
