"""ddprun's stdout and stderr: one thread writes the output of the ranks and of ddprun itself.

The program or terminal that reads the output may be slow or paused. Therefore text waits in a bounded queue. While the
queue is full, new text is dropped and counted, so that the training is not blocked.
"""

import contextlib
import os
import queue
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Callable

from ddprun.system.file_writer import FileWriter, write_all

MAX_QUEUED_TEXTS = 10_000
READER_TIMEOUT_S = 1.0  # a reader may pause for so long before text is dropped
NUM_LAST_LINES = 15


class Console:
    """Writes to ddprun's stdout and stderr, in a thread that the method ``start`` starts."""

    def __init__(self, name: str, on_log: Callable[[bytes], object] = bytes, files: FileWriter | None = None) -> None:
        """If stdout or stderr is a file, such as node.log, ``files`` writes it."""
        self.name = name
        self._writer = files or FileWriter()
        self._on_log = on_log  # called with each line from ddprun itself
        self._texts: queue.Queue[tuple[int, bytes, object]] = queue.Queue(MAX_QUEUED_TEXTS)
        self._num_dropped = 0
        self._last: deque[bytes] = deque(maxlen=NUM_LAST_LINES)  # the last lines of the ranks
        self._files = {descriptor: _file_of(descriptor) for descriptor in (1, 2)}  # device, inode, is regular
        self._unfinished: dict[object, object] = {}  # file → the source of the unfinished line at its end
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_one_place(self) -> bool:
        """Whether stdout and stderr are the same file, pipe or terminal."""
        return self._files[1] == self._files[2]

    def start(self) -> None:
        """Start the thread that writes queued text. Call this after the fork, because no thread may exist before it."""
        with self._starting:
            if not self._thread:
                self._thread = threading.Thread(target=self._run, name="console", daemon=True)
                self._thread.start()

    def log(self, text: str) -> None:
        """Queue a line from ddprun itself for stderr."""
        line = f"{text}\n".encode(errors="replace")  # the message of an exception may have a lone surrogate
        self._on_log(line)
        self.put(2, f"[{self.name}] ".encode() + line)

    def log_now(self, text: str) -> None:
        """Queue a line. Write it at once if ``start`` has not been called yet and neither stream would block."""
        self.log(text)
        with contextlib.suppress(OSError, ValueError):  # a stream is closed
            while not self._thread and self._texts.qsize() and select.select([], [1, 2], [], 0)[1] == [1, 2]:
                self._write()

    def put(self, descriptor: int, text: bytes, source: object = None) -> None:
        """Queue ``text`` from ``source``, which is a stream of a rank, or None for ddprun itself.

        If the queue is full, wait at most READER_TIMEOUT_S, then drop the text. After a drop, do not wait again until
        some text has been queued. If the last line of another source is incomplete, ``text`` begins on a new line.
        """
        try:
            self._texts.put((descriptor, text, source), timeout=0 if self._num_dropped else READER_TIMEOUT_S)
        except queue.Full:
            self._num_dropped += text.count(b"\n") or 1
            return
        if source is not None:
            self._last.extend(text.splitlines(keepends=True))
        if self._num_dropped:
            note = f"[{self.name}] {self._num_dropped} lines were dropped here, but they are in the ranks' logs\n"
            with contextlib.suppress(queue.Full):
                self._texts.put_nowait((2, note.encode(), None))
                self._num_dropped = 0

    def recently_shown(self, line: str) -> bool:
        """Return whether ``line`` is one of the last NUM_LAST_LINES lines that the ranks printed."""
        return line in [shown.decode(errors="replace") for shown in tuple(self._last)]

    def drain(self, timeout_s: float) -> None:
        """Wait until all text is written, or until no text has been written for ``timeout_s``.

        If text was dropped, print how much.
        """
        self.start()
        pending, deadline = self._texts.unfinished_tasks, time.monotonic() + timeout_s
        while pending and time.monotonic() < deadline:
            time.sleep(0.005)
            if self._texts.unfinished_tasks != pending:
                pending, deadline = self._texts.unfinished_tasks, time.monotonic() + timeout_s
        self._writer.flush(timeout_s)
        lost = self._num_dropped + pending
        *_, is_regular = self._files[2]  # its disk may not answer
        if lost and not is_regular and select.select([], [2], [], 0)[1]:
            note = f"{lost} pieces of output were dropped because nothing read them, but they are in the ranks' logs"
            with contextlib.suppress(OSError):
                os.write(2, f"[{self.name}] {note}\n".encode())

    def _run(self) -> None:
        while True:
            self._write()

    def _write(self) -> None:
        descriptor, text, source = self._texts.get()
        file = self._files[descriptor]
        if self._unfinished.get(file) not in (None, source):
            text = b"\n" + text
        self._unfinished[file] = None if text.endswith(b"\n") else source
        with contextlib.suppress(OSError):  # nobody reads the output any more; the ranks' logs have it
            while text:
                if file[2]:
                    self._writer.submit(write_all, 1 if self.is_one_place else descriptor, text, waits=True)
                    break
                try:
                    text = text[os.write(descriptor, text) :]
                except BlockingIOError:  # another process has made the shared pipe or terminal non-blocking
                    select.select([], [descriptor], [])
        self._texts.task_done()


def _file_of(descriptor: int) -> tuple[int, int, bool]:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return -1, descriptor, False
    return status.st_dev, status.st_ino, stat.S_ISREG(status.st_mode)
