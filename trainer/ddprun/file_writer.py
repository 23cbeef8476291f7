"""A process that writes the files of the run's folder, so that no thread of ddprun waits for a disk.

A thread that waits for a frozen file system sleeps in the kernel. It cannot be killed, and it keeps its process from
ending. So only this process sleeps there, and ddprun can leave it behind. It performs function calls in their order;
the functions are found by name (pickle). It ends after the last call when ddprun has ended.
"""

import contextlib
import os
import pickle
import queue
import signal
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ddprun import processes
from ddpwire.run_files import write_atomic

MAX_PENDING_BYTES = 1 << 24  # of log lines; if more are pending, the thread that reads the ranks' output waits
STALL_S = 1.0  # after a longer call, a writer without ddprun performs no further call: the files may be another's
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
HEADER_BYTES = 4

_open_files: dict[Path, int] = {}  # in the process that writes: the files that stay open


def open_file(path: Path) -> tuple[int, bytes]:
    """Open a file to which ``append`` will write. Return its size and its last byte. Raises OSError."""
    close_file(path)
    descriptor = _open_files[path] = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    size = os.fstat(descriptor).st_size
    return size, os.pread(descriptor, 1, size - 1) if size else b""


def append(path: Path, data: bytes) -> None:
    """Append to a file, which stays open. Raises OSError."""
    if path not in _open_files:
        open_file(path)
    write_all(_open_files[path], data)


def close_file(path: Path) -> None:
    """Close a file to which ``append`` has written."""
    if path in _open_files:
        os.close(_open_files.pop(path))


def replace_file(path: Path, data: bytes, sync: bool = True) -> None:
    """Replace a file at once (run_files.write_atomic). Raises OSError."""
    close_file(path)
    write_atomic(path, data, sync=sync)


def write_all(descriptor: int, data: bytes) -> None:
    """Write to a descriptor. Raises OSError."""
    while data:
        data = data[os.write(descriptor, data) :]


class FileWriter:
    """Performs calls in another process, or in this one if it has none (``fork`` is not set, or it was killed)."""

    def __init__(self, *, fork: bool = False) -> None:
        """If ``fork`` is set, fork the process. This process must not have threads yet. Raises OSError."""
        self.pid = 0
        self._socket: socket.socket | None = None
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards the fields below
        self._is_started = False
        self._pending: deque[tuple[Callable[..., Any], tuple[Any, ...], int]] = deque()  # with the size of the request
        self._pending_bytes = self._num_posted = self._num_done = 0
        self._results: dict[int, Any] = {}  # what ``call`` waits for, by the number of the call
        if fork:
            self._fork()

    def start(self) -> None:
        """Start the threads that send the calls and receive the results. Before, calls are sent at once."""
        with self._changed:
            if self._is_started or self._socket is None:
                return
            self._is_started = True
            for run in (self._send, self._receive):
                threading.Thread(target=run, name="files", daemon=True).start()

    def submit(self, function: Callable[..., Any], *args: Any, waits: bool = False) -> int:
        """Perform a call some time later; an OSError is not reported. Return the call's number for ``is_done``.

        ``waits``: whether this thread may wait until fewer than MAX_PENDING_BYTES are pending.
        """
        with self._changed:
            while waits and self._pending_bytes > MAX_PENDING_BYTES and self._socket:
                self._changed.wait()
        return self._post(function, args)

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        """Perform a call after those before it, and return its result. Raises OSError, TimeoutError."""
        self.start()
        number = self._post(function, args, is_awaited=True)
        with self._changed:
            done = self._changed.wait_for(lambda: self.is_done(number), timeout_s)
            result = self._results.pop(number, None)
        if not done:
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        if isinstance(result, OSError):
            raise result
        return result

    def is_done(self, number: int) -> bool:
        """Return whether a call was performed."""
        return self._num_done >= number

    def flush(self, timeout_s: float) -> bool:
        """Wait until all calls so far are performed, but at most ``timeout_s``. Return whether they are."""
        self.start()
        with self._changed:
            number = self._num_posted
            return self._changed.wait_for(lambda: self.is_done(number), timeout_s)

    def _post(self, function: Callable[..., Any], args: tuple[Any, ...], *, is_awaited: bool = False) -> int:
        request = pickle.dumps((function, args)) if self._socket else b""
        with self._changed:
            self._num_posted += 1
            number = self._num_posted
            if is_awaited:
                self._results[number] = None
            self._pending.append((function, args, len(request)))
            self._pending_bytes += len(request)
            if self._socket is None:
                self._perform_here()
            elif self._is_started:
                self._requests.put(request)
            else:
                with contextlib.suppress(OSError):  # the process was killed: _receive performs the calls
                    self._socket.sendall(len(request).to_bytes(HEADER_BYTES) + request)
        return number

    def _finish(self, result: Any) -> None:
        self._num_done += 1
        if self._num_done in self._results:
            self._results[self._num_done] = result
        self._pending_bytes -= self._pending.popleft()[2]
        self._changed.notify_all()

    def _perform_here(self) -> None:
        while self._pending:
            function, args, _ = self._pending[0]
            self._finish(_perform(function, args))

    def _send(self) -> None:
        while connection := self._socket:
            request = self._requests.get()
            with contextlib.suppress(OSError):  # the process was killed: _receive performs the calls
                connection.sendall(len(request).to_bytes(HEADER_BYTES) + request)

    def _receive(self) -> None:
        assert self._socket is not None, "it is started only with a process"  # noqa: S101
        with self._socket.makefile("rb") as answers, contextlib.suppress(OSError):  # an error: the process was killed
            while header := answers.read(HEADER_BYTES):
                result = pickle.loads(answers.read(int.from_bytes(header)))  # noqa: S301 (from our own process)
                with self._changed:
                    self._finish(result)
        with self._changed:
            self._socket = None
            self._perform_here()

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            _serve(theirs, parent)
        theirs.close()
        self._socket = ours


def _perform(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return function(*args)
    except OSError as error:
        return error


def _serve(connection: socket.socket, parent: int) -> NoReturn:
    """Perform the calls that arrive, until ddprun has closed its end of the connection."""
    try:
        for number in SIGNALS:  # sent to a whole process group, they are for the ranks
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        processes.close_descriptors(connection.fileno())
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # a pipe must end with ddprun; a file, such as node.log, is written here
            if not descriptor or not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.dup2(null, descriptor)
        requests = connection.makefile("rb")
        while len(header := requests.read(HEADER_BYTES)) == HEADER_BYTES:
            function, args = pickle.loads(requests.read(int.from_bytes(header)))  # noqa: S301 (from ddprun itself)
            began = time.monotonic()
            answer = pickle.dumps(_perform(function, args))
            if os.getppid() != parent and time.monotonic() - began > STALL_S:
                break
            with contextlib.suppress(OSError):  # ddprun has ended, but its last calls are performed
                connection.sendall(len(answer).to_bytes(HEADER_BYTES) + answer)
    finally:
        os._exit(0)
