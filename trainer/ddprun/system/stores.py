"""Clients of stores. None of their calls waits forever, and values are signed if the run has a secret.

TCPStore's own calls may wait forever, for example if another program accepts the connection and stays silent, or if the
store's machine loses power. TCPStore's own timeouts do not help, because they apply only if the store answers that a
key is missing.
"""

import contextlib
import hmac
import json
import os
import queue
import reprlib
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in torch's __all__
    DistError,
    DistNetworkError,
    DistStoreError,
    Store,
    TCPStore,
)

from ddprun.system import network
from ddprun.system.errors import config_error, node_error
from ddpwire import names
from ddpwire.exits import Exit
from ddpwire.machine import call_with_timeout

T = TypeVar("T")
StoreError = DistError  # raised if a store, or a key in it, does not appear in time
TIMEOUT = timedelta(seconds=10)  # an operation on a reachable store takes a millisecond
ANSWER_TIMEOUT_S = 4.0  # as NODE_LOST_S: a store that is reachable answers within a millisecond
POLL_S = 0.05  # for keys, if a call must not block
SIGNED = b"hmac-sha256:"  # begins a signed value; then come the signature, a space and the value itself
CONNECT_TIMEOUT_S = 2.5  # a store answers at once, from a C++ thread that nothing blocks; a foreign server may not
FIRST_TIMEOUT_S = 8.0  # of the first connection: see short_lookups, up to 3 s here, and up to 3 s at the store


@contextlib.contextmanager
def short_lookups() -> Iterator[None]:
    """Let threads that begin meanwhile wait for each name server (there may be 3) for only a second, and ask once.

    torch looks up the name of each address that connects to a store, in the only thread that serves the store. After
    an error, no thread of the process asks any more (formatSockAddr in torch/csrc/distributed/c10d/socket.cpp). If the
    name server is silent or late, the store would answer nobody for up to 30 s, and would seem to be lost.

    The C library reads the variable (resolv.conf(5)) at a thread's first lookup. Programs of the job do not get it.
    """
    if "RES_OPTIONS" in os.environ:  # the user's
        yield
        return
    os.putenv("RES_OPTIONS", "timeout:1 attempts:1")
    try:
        yield
    finally:
        os.unsetenv("RES_OPTIONS")


def decode(key: str, value: bytes | str, make: Callable[[Any], T]) -> T:
    """Decode a JSON value of the store with ``make``. Raises NodeError for a value that ddprun would never write."""
    try:
        return make(json.loads(value))
    except (ValueError, TypeError, KeyError, AttributeError):
        message = f"the key '{key}' of the run's store has the value {reprlib.repr(value)}, which no ddprun writes"
        hint = "another program reaches the run's port: give the run another port, or close this one to others"
        raise node_error(Exit.UNAVAILABLE, "unavailable", message, hint=hint) from None


_Call = tuple[Future[Any], Callable[[], Any]]


def _run_calls(calls: "queue.SimpleQueue[_Call | None]") -> None:
    """Make the calls of a TimeoutStore until it is deleted. The thread does not keep the store alive."""
    while item := calls.get():
        answer, call = item
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)
        del item, answer, call  # while this waits for the next call, nothing may refer to the store


def _method(name: str, convert: Callable[[Any], T]) -> Callable[..., T]:
    """Return the method ``name`` of a TimeoutStore, which calls that of the store itself and converts the result."""

    def method(self: "TimeoutStore", *args: Any) -> T:
        return convert(self._call(lambda: getattr(self._store, name)(*args)))

    return method


class TimeoutStore(Store):
    """A client of a store. Each call returns, or raises StoreError soon after its timeout."""

    set = _method("set", lambda _: None)
    add = _method("add", int)
    delete_key = _method("delete_key", bool)
    check = _method("check", bool)
    compare_set = _method("compare_set", bytes)

    def __init__(self, store: Any, timeout: timedelta = TIMEOUT, *, is_quick: bool = False) -> None:
        """``timeout`` is the store's own timeout for missing keys.

        ``is_quick``: the store counts as lost ANSWER_TIMEOUT_S after a call, otherwise only after ``timeout`` and that.
        """
        super().__init__()
        self._store = store
        self._timeout, self._is_quick = timeout, is_quick
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._is_unresponsive = False
        threading.Thread(target=_run_calls, args=(self._calls,), name="store", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)  # each attempt has a client: its thread and socket end with it

    def _call(self, call: Callable[[], Any], timeout: timedelta | None = None) -> Any:
        answer: Future[Any] = Future()
        if not self._is_unresponsive:
            self._calls.put((answer, call))
            try:
                limit = timeout or (timedelta(0) if self._is_quick else self._timeout)
                return answer.result(limit.total_seconds() + ANSWER_TIMEOUT_S)
            except TimeoutError:
                self._is_unresponsive = True  # the thread is still blocked
        raise DistNetworkError("the store no longer answers")

    @property
    def port(self) -> int:
        """Return the port on which the store listens."""
        return int(self._store.port)

    def clone(self) -> "TimeoutStore":
        """Return a new connection to the same store."""
        return TimeoutStore(self._call(self._store.clone), self._timeout, is_quick=self._is_quick)

    def get(self, key: str) -> bytes:
        """Implement ``Store.get``."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Implement ``Store.multi_get``. If this store is quick, wait for the keys without a call that blocks."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        while self._is_quick and not self.check(keys):
            if time.monotonic() > deadline:
                raise DistStoreError(f"no {', '.join(keys)} within {self._timeout}")
            time.sleep(POLL_S)
        return [bytes(value) for value in self._call(lambda: self._store.multi_get(keys))]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Implement ``Store.wait``."""
        limit = timeout or self._timeout
        self._call(lambda: self._store.wait(keys, limit), limit)


class SignedStore:
    """A store whose values are signed if the run has a secret. Counters are never signed.

    torch uses ``wrapped``, whose values are not signed.
    """

    def __init__(self, store: Any, secret: bytes, run_id: str) -> None:
        self.wrapped = store
        self._secret, self._run_id = secret, run_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def clone(self) -> "SignedStore":
        """Return a new connection to the same store."""
        return SignedStore(self.wrapped.clone(), self._secret, self._run_id)

    def set(self, key: str, value: str) -> None:
        """Implement ``Store.set``."""
        self.wrapped.set(key, self._signature(key, value.encode()).decode() + value)

    def get(self, key: str) -> bytes:
        """Implement ``Store.get``. Raises NodeError for a value that no node of this run has signed."""
        return self._verify(key, bytes(self.wrapped.get(key)))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Implement ``Store.multi_get``. Raises NodeError for a value that no node of this run has signed."""
        return [self._verify(key, bytes(value)) for key, value in zip(keys, self.wrapped.multi_get(keys), strict=True)]

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Implement ``Store.compare_set``. An empty ``expected`` means a missing key.

        Raises NodeError for a value that no node of this run has signed.
        """
        value = self._signature(key, value.encode()).decode() + value
        return self._verify(key, bytes(self.wrapped.compare_set(key, expected, value)))

    def _signature(self, key: str, value: bytes) -> bytes:
        if not self._secret:
            return b""
        text = b"\0".join((self._run_id.encode(errors="surrogateescape"), key.encode(), value))
        return SIGNED + hmac.new(self._secret, text, "sha256").hexdigest().encode() + b" "

    def _verify(self, key: str, stored: bytes) -> bytes:
        if not self._secret and stored.startswith(SIGNED):
            message = "the nodes of this run sign what they write into its store, but this node has no secret"
            hint = f"on this node, set {names.SECRET_FILE} to the file that the other nodes use"
            raise config_error(message, hint=hint)
        value = stored.partition(b" ")[2] if self._secret else stored
        if hmac.compare_digest(stored, self._signature(key, value) + value):
            return value
        state = "a wrong signature" if stored.startswith(SIGNED) else "no signature"
        hint = f"another program reaches the run's port, or not all nodes have the same {names.SECRET_FILE}"
        raise node_error(Exit.UNAVAILABLE, "unavailable", f"the key '{key}' of the run's store has {state}", hint=hint)


def connect(address: str, port: int, *, is_quick: bool = False, timeout_s: float = CONNECT_TIMEOUT_S) -> TimeoutStore:
    """Connect to a store. Raises StoreError if the process that listens at address:port is not a store."""
    make = partial(TCPStore, address, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    try:
        with short_lookups():
            store = call_with_timeout(make, timeout_s, thread="connect")
        return TimeoutStore(store, is_quick=is_quick)
    except TimeoutError:
        raise DistNetworkError(f"{address}:{port} does not answer as a store") from None


def connect_to_node_0(address: str, port: int, *, is_quick: bool = False) -> TimeoutStore:
    """Connect to node 0's store. Raises NodeError if the process that listens at address:port is not a store."""
    try:
        return connect(address, port, is_quick=is_quick, timeout_s=FIRST_TIMEOUT_S)
    except StoreError:
        message = f"{address}:{port} answers, but not as node 0's store: another program may be listening there"
        raise node_error(Exit.UNAVAILABLE, "unavailable", message) from None


def serve(host: str, listener: socket.socket) -> TCPStore:
    """Serve a store on ``listener``, a bound socket, so that no other process can take its port. Raises OSError."""
    listener.listen(network.LISTEN_BACKLOG)
    make = partial(
        TCPStore,
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    with short_lookups():  # in a thread of its own, because later lookups of this thread must not be short
        return call_with_timeout(make, FIRST_TIMEOUT_S, thread="serve")
