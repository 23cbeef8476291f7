"""Signals that ask a rank to stop. A rank that gets a signal during training saves a checkpoint before it stops.

A rank that gets a signal while it is starting stops at once. This module does not import torch, because the handlers
must be installed before torch is imported.
"""

import os
import signal
import threading
from typing import Any

from ddpwire.exits import Exit
from ddpwire.streams import leave_lost

# If ranks receive different signals, they agree on the highest exit code.
STOPS = {
    signal.SIGINT: Exit.INTERRUPTED,
    signal.SIGUSR1: Exit.SAVED_USR1,
    signal.SIGUSR2: Exit.SAVED_USR2,
    signal.SIGTERM: Exit.SAVED_TERM,
    signal.SIGHUP: Exit.SAVED_TERM,  # the terminal was closed
}


class Signals:
    """The signals that this process has received. ``code`` is the exit code that they request, or 0 without a signal.

    A thread reads them from a pipe, because a Python handler runs only after the main thread has returned from C++
    code. During a rendezvous, this can take minutes.
    """

    def __init__(self) -> None:
        self.code = 0
        self.can_save = False  # set by the trainer while it can save a checkpoint before it stops
        self._before: dict[int, Any] = {}  # the handlers that were replaced
        self._mask = threading.local()  # several threads may fork at the same time

    def install(self) -> None:
        """Install the handlers. Call this once per process, from the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOPS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # the process was started with nohup
            if number == signal.SIGUSR2 and callable(signal.getsignal(number)):
                continue  # programs that requeue a job use SIGUSR2, and call the script after they have set its handler
            self._before[number] = signal.signal(number, self._handle)  # without a handler, it is not in the pipe
        threading.Thread(target=self._watch, args=(reader,), daemon=True, name="signals").start()
        os.register_at_fork(before=self._hold, after_in_parent=self._let_go, after_in_child=self._give_back)

    def _handle(self, number: int, _: object) -> None:
        """Stop if a handler that the script has installed later calls this one. Otherwise the thread does it."""
        if signal.getsignal(number) != self._handle:
            self._stop(number)

    def _watch(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 16):
                if signal.getsignal(number) == self._handle:  # no other signal, and no handler of the script
                    self._stop(number)

    def _stop(self, number: int) -> None:
        if number == signal.SIGHUP:
            leave_lost()  # printing about the stop would fail
        code = STOPS[signal.Signals(number)]
        second_interrupt = code == self.code == Exit.INTERRUPTED
        if not self.can_save or second_interrupt:
            os._exit(code)
        self.code = max(self.code, code)

    def _hold(self) -> None:
        """Block the signals before a fork, so that a signal for the new child stays pending and is not lost."""
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)

    def _let_go(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def _give_back(self) -> None:
        """Restore the earlier handlers in a forked child (such as a DataLoader worker), so that signals end it."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handle:  # the script has not replaced it
                signal.signal(number, handler or signal.SIG_DFL)
        self._let_go()
