"""Signals, and the lifeline, become calls in a thread of their own: at any moment, whatever the main thread is doing.

Until ``listen`` there is no thread, so that the process may be forked: then they become calls in the main thread.

(Python runs a handler between two bytecodes of the main thread, so not while that waits in C++; the kernel's signal
number comes through ``set_wakeup_fd`` at once. No signal that is listened to kills ddprun by itself.)
"""

import os
import select
import signal
import socket
import threading
from collections.abc import Callable

from ddprun.errors import bad_contract
from ddpwire import names

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Listens from the moment it is made. What to do can change: ``on_stop`` and ``on_pass`` are set by the owner."""

    def __init__(self, on_stop: Callable[[int], None], on_pass: Callable[[int], None]) -> None:
        self.on_stop = on_stop
        self.on_pass = on_pass
        self._listening = False
        self._asked = False  # for a stop
        self._lifelines: list[int] = []
        self._read, write = socket.socketpair()
        write.setblocking(False)
        self._write = write  # kept open
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        for number in (*STOPS, *PASSED_ON):
            if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:  # nohup means what it says
                signal.signal(number, lambda number, _: self._now(number))

    def listen(self) -> None:
        """From now on in a thread."""
        self._listening = True
        for descriptor in self._lifelines:
            threading.Thread(target=self._watch, args=(descriptor,), name="lifeline", daemon=True).start()
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def stop(self) -> None:
        """As if a SIGTERM had come, unless one has: a second one would take the ranks' grace away."""
        if self._asked:
            return
        self._write.send(bytes([signal.SIGTERM]))

    def _now(self, number: int) -> None:
        if not self._listening:
            self._read.recv(1)  # what the thread would have read
            self._hear(number)

    def watch_lifeline(self, descriptor: int) -> None:
        """Take the end of file of ``descriptor`` for a SIGTERM: whoever held the other end is gone."""
        try:
            os.set_inheritable(descriptor, False)
        except (OSError, OverflowError):
            raise bad_contract(f"{names.LIFELINE_FD} is {descriptor}: no such descriptor is open") from None
        self._lifelines.append(descriptor)

    def _watch(self, descriptor: int) -> None:
        try:
            select.select([descriptor], [], [])
            while os.read(descriptor, 4096):
                pass
        except OSError:
            return  # never was a lifeline
        self.stop()

    def _listen(self) -> None:
        while numbers := self._read.recv(64):
            for number in numbers:
                self._hear(number)

    def _hear(self, number: int) -> None:
        if number in STOPS:
            self._asked = True
            self.on_stop(signal.SIGTERM if number == signal.SIGHUP else number)
        elif number in PASSED_ON:
            self.on_pass(number)
