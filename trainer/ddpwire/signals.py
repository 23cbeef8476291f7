"""Signals that ask a rank to stop: at once while it starts up, after a saved step once it trains.

Knows nothing of torch: it must be there before torch is imported.
"""

import os
import signal
import threading
from types import FrameType
from typing import Any

from ddpwire.exits import Exit
from ddpwire.streams import leave_lost

# Ordered by the code, which is also how the ranks agree when they saw different signals: the highest wins.
STOPS = {
    signal.SIGINT: Exit.INTERRUPTED,
    signal.SIGUSR1: Exit.SAVED_USR1,
    signal.SIGTERM: Exit.SAVED_TERM,
    signal.SIGHUP: Exit.SAVED_TERM,  # the terminal was closed
}


class Signals:
    """The signals that this process has seen; ``code`` is the exit code they ask for, 0 for none.

    A thread reads them from a pipe, because a Python handler has to wait for whatever C++ the main thread is in, and a
    rendezvous waits there for minutes.
    """

    def __init__(self) -> None:
        self.code = 0
        self.can_save = False  # set by the trainer for as long as a stop can be answered with a checkpoint
        self._before: dict[int, Any] = {}
        self._mask = threading.local()  # several threads may fork at a time

    def install(self) -> None:
        """Take the signals over. Once a process, from its main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOPS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup means what it says
            self._before[number] = signal.signal(number, _nothing)
        threading.Thread(target=self._watch, args=(reader,), daemon=True, name="signals").start()
        os.register_at_fork(before=self._hold, after_in_parent=self._let_go, after_in_child=self._give_back)

    def _watch(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 16):
                if number not in STOPS:
                    continue
                if number == signal.SIGHUP:
                    leave_lost()  # what is said of the stop would be an error
                code = STOPS[signal.Signals(number)]
                second_interrupt = code == self.code == Exit.INTERRUPTED
                if not self.can_save or second_interrupt:
                    os._exit(code)
                self.code = max(self.code, code)

    def _hold(self) -> None:
        """While a child is forked: what is told to it in its first instant waits, and is not lost."""
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)

    def _let_go(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def _give_back(self) -> None:
        """In a forked child, as a DataLoader's worker: what is told to it is not told to us, and ends it as ever."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        self._let_go()


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """A handler, so that the signal is written to the pipe and does nothing else."""
