"""A process that writes the files of the run's folder, so that no thread of ddprun waits for a disk.

A thread that waits for a frozen file system sleeps in the kernel. It cannot be killed, and it keeps its process from
ending. So only this process sleeps there, and ddprun can leave it behind. It performs one function call after another;
the functions are found by name (pickle). It ends when ddprun has ended.
"""

import contextlib
import multiprocessing
import os
import signal
import stat
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from ddprun.system import processes
from ddpwire.run_files import append_bounded, write_atomic

T = TypeVar("T")
READ_S = 2.0  # without an answer; shorter than the silence after which a node counts as lost
MAX_PENDING_BYTES = 1 << 24  # of log lines; if more are pending, the thread that reads the ranks' output waits
MAX_APPEND_BYTES = 1 << 20  # a pending call that appends more takes no more data
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

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


APPENDS = (append, append_bounded, write_all)  # their first argument is the file, the second the data


class Call(NamedTuple):
    """A call that is pending."""

    result: Future[Any]
    file: tuple[Any, ...]  # of an append: the function and its arguments without the data
    function: Callable[..., Any]
    args: tuple[Any, ...]


class FileWriter:
    """Performs calls, in their order, in another process as soon as ``start`` is called; before, in this one."""

    def __init__(self, *, fork: bool = False) -> None:
        """If ``fork`` is set, fork the process. This process must not have threads yet. Raises OSError."""
        self.pid = 0
        self._connection: Connection | None = None
        self._changed = threading.Condition(threading.RLock())  # guards the fields below, and calls in this process
        self._calls: deque[Call] = deque()
        self._appends: dict[tuple[Any, ...], Call] = {}  # the pending calls that later appends may join
        self._pending_bytes = 0
        self.num_performed = 0  # stands still while the disk does not answer
        self._is_started = False
        if fork:
            self._connection, theirs = multiprocessing.Pipe()
            self.pid = os.fork()
            if not self.pid:
                _serve(theirs)
            theirs.close()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin a call whose result is not needed. Only before ``start``, and until ``has_ended`` is true, no other."""
        assert self._connection, "the process was forked"  # noqa: S101 -- ours to keep
        self._connection.send((function, args))

    def has_ended(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the call that ``begin`` began. Return whether it has ended."""
        assert self._connection, "the process was forked"  # noqa: S101 -- ours to keep
        if not self._connection.poll(timeout_s):
            return False
        with contextlib.suppress(OSError, EOFError):  # the process was killed: the next call notices it
            self._connection.recv()
        return True

    def start(self) -> None:
        """Start the thread that passes the calls on."""
        with self._changed:
            if self._connection and not self._is_started:
                self._is_started = True
                threading.Thread(target=self._pass_on, name="files", daemon=True).start()

    def submit(self, function: Callable[..., Any], *args: Any, waits: bool = False) -> "Future[Any]":
        """Perform a call some time later. The result has its OSError. An append joins a pending one to the same file.

        ``waits``: whether this thread may wait until fewer than MAX_PENDING_BYTES are pending.
        """
        file = (function, args[0], *args[2:]) if function in APPENDS else ()
        with self._changed:
            while waits and self._pending_bytes > MAX_PENDING_BYTES:
                self._changed.wait()
            call = self._appends.get(file)
            if not call or len(call.args[1]) > MAX_APPEND_BYTES:
                call = Call(Future(), file, function, (args[0], bytearray(), *args[2:]) if file else args)
                self._calls.append(call)
            if file:
                self._appends[file] = call
                call.args[1].extend(args[1])
                self._pending_bytes += len(args[1])
            else:
                self._appends.clear()  # no append overtakes another call
            self._changed.notify_all()
            if not self._is_started:
                self._perform_next()
        return call.result

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        """Perform a call after those before it, and return its result. Raises OSError, TimeoutError."""
        self.start()
        return self.submit(function, *args).result(timeout_s)

    def read(self, function: Callable[..., T], *args: Any, unknown: T) -> T:
        """Return what a function reads from the disk, or ``unknown`` if the disk answers no call within READ_S."""
        result, num_performed = self.submit(function, *args), -1
        while not result.done() and num_performed != self.num_performed:
            num_performed = self.num_performed
            wait([result], READ_S)
        try:
            return result.result(0)  # type: ignore[no-any-return]
        except OSError:
            return unknown

    def flush(self, timeout_s: float) -> None:
        """Wait until all calls so far are performed, but at most ``timeout_s``."""
        wait([self.submit(os.getpid)], timeout_s)

    def _perform_next(self) -> None:
        with self._changed:
            while not self._calls:
                self._changed.wait()
            call = self._calls.popleft()
            self._appends.pop(call.file, None)
        value: Any = None
        try:
            if self._connection and self._is_started:
                self._connection.send((call.function, call.args))
                value = self._connection.recv()
            else:
                value = _perform(call.function, call.args)
        except (OSError, EOFError):  # the process was killed
            self._connection = None
            value = _perform(call.function, call.args)
        if isinstance(value, Exception):
            call.result.set_exception(value)
        else:
            call.result.set_result(value)
        with self._changed:
            self._pending_bytes -= len(call.args[1]) if call.file else 0
            self.num_performed += 1
            self._changed.notify_all()

    def _pass_on(self) -> None:
        while True:
            self._perform_next()


def _perform(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return function(*args)
    except Exception as error:  # raised where the result is read
        return error


def _serve(connection: Connection) -> NoReturn:
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
        while True:
            connection.send(_perform(*connection.recv()))
    finally:  # ddprun has ended
        os._exit(0)
