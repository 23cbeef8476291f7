"""Connections to stores none of whose calls waits for ever.

TCPStore by itself does: for a stranger that takes a connection and is silent, and for a machine that had answered and
lost its power. Then no connection is closed, and time-outs count only while the store answers that a key is not there.
"""

import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, Store, TCPStore  # type: ignore[attr-defined]  # public, all

from ddprun import ports

TIMEOUT = timedelta(seconds=10)  # an operation on a store that is there takes a millisecond
ANSWER_S = 4.0
GREET_S = 2.5  # until a stranger has not answered; a store does at once, from a thread of C++ that nothing holds up


class AnsweringStore(Store):
    """A store elsewhere: each call is answered, or raises RuntimeError soon after its own time-out."""

    def __init__(self, store: Any, timeout: timedelta = TIMEOUT) -> None:
        """``timeout`` is the store's own, for a key that is not there."""
        super().__init__()
        self._store = store
        self._timeout = timeout
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._is_silent = False
        threading.Thread(target=self._make_calls, name="store", daemon=True).start()

    def _make_calls(self) -> None:
        while True:
            answer, call = self._calls.get()
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)

    def _ask(self, call: Callable[[], Any], timeout: timedelta | None = None) -> Any:
        answer: Future[Any] = Future()
        if not self._is_silent:
            self._calls.put((answer, call))
            try:
                return answer.result((timeout or self._timeout).total_seconds() + ANSWER_S)
            except TimeoutError:
                self._is_silent = True  # the thread still waits
        raise DistNetworkError("the store does not answer any more")

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._store.port)

    def clone(self) -> "AnsweringStore":
        """Another connection."""
        return AnsweringStore(self._ask(self._store.clone), self._timeout)

    def set(self, key: str, value: str) -> None:
        """See Store."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """See Store."""
        return bytes(self._ask(lambda: self._store.get(key)))

    def add(self, key: str, number: int) -> int:
        """See Store."""
        return int(self._ask(lambda: self._store.add(key, number)))

    def check(self, keys: list[str]) -> bool:
        """See Store."""
        return bool(self._ask(lambda: self._store.check(keys)))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """See Store."""
        return bytes(self._ask(lambda: self._store.compare_set(key, expected, value)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See Store."""
        self._ask(lambda: self._store.wait(keys, timeout or self._timeout), timeout)


def connect(address: str, port: int) -> AnsweringStore:
    """The store on ``address``, where somebody listens. Raises RuntimeError when it is none."""
    made: list[TCPStore] = []

    def run() -> None:
        try:
            made.append(TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT))
        except RuntimeError:
            return

    connecting = threading.Thread(target=run, name="connect", daemon=True)
    connecting.start()
    connecting.join(GREET_S)
    if not made:
        raise RuntimeError
    return AnsweringStore(made[0])


def serve(host: str, listener: socket.socket) -> TCPStore:
    """A store on a port that is already ours, so that nothing can take it in between. Raises OSError."""
    listener.listen(ports.BACKLOG)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=listener.detach(),
    )
