"""What the ranks and ddprun itself say: every byte into the rank's file, every whole line to stdout with its origin.

The file is the truth and is always written. Whoever reads ddprun's stdout may be slow or stuck (a paused terminal):
lines wait for them in a bounded queue, and past that are left out of stdout, and counted, lest they block the training.
"""

import contextlib
import os
import queue
import re
import selectors
import threading
import time
from pathlib import Path

CHUNK = 1 << 16  # bytes read at once, and the longest line that is kept together on stdout
BACKLOG = 10_000  # lines
PATIENCE_S = 1.0
TAIL_BYTES = 1 << 14
LONGEST_WORD = 200


class Console:
    """ddprun's stdout and stderr, written by one thread, one line at a time; until ``start`` there is none."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: queue.Queue[tuple[int, bytes]] = queue.Queue(BACKLOG)
        self._num_left_out = 0
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write what has been said, and all that will be. Not before: a process that forks has no thread."""
        with self._starting:
            if not self._thread:
                self._thread = threading.Thread(target=self._run, name="console", daemon=True)
                self._thread.start()

    def say(self, text: str) -> None:
        """A line of ddprun's own, for a person."""
        self.put(2, f"[{self._name}] {text}\n".encode())

    def put(self, descriptor: int, line: bytes) -> None:
        """Write a line as soon as may be. It waits a second at the most, and only once for a reader that is stuck."""
        try:
            self._lines.put((descriptor, line), timeout=0 if self._num_left_out else PATIENCE_S)
        except queue.Full:
            self._num_left_out += 1
            return
        if self._num_left_out:
            note = f"[{self._name}] {self._num_left_out} lines were left out here; the ranks' logs have them\n"
            with contextlib.suppress(queue.Full):
                self._lines.put_nowait((2, note.encode()))
                self._num_left_out = 0

    def drain(self, timeout_s: float) -> None:
        """Wait until all is written, unless the reader is stuck."""
        self.start()
        deadline = time.monotonic() + timeout_s
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)

    def _run(self) -> None:
        while True:
            descriptor, line = self._lines.get()
            with contextlib.suppress(OSError):  # the reader is gone: the files go on
                while line:
                    line = line[os.write(descriptor, line) :]
            self._lines.task_done()


class RankLogs:
    """The pipes from this node's ranks, read by one thread."""

    def __init__(self, console: Console, node: int) -> None:
        self._console = console
        self._node = node
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._open: set[Pipe] = set()
        self._new: queue.SimpleQueue[Pipe] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    def open(self, rank: int, path: Path) -> int:
        """A descriptor for the rank to write to, to be closed here once the rank has it. Raises OSError."""
        read, write = os.pipe()
        pipe = Pipe(read, path, f"[node{self._node} rank{rank}] ".encode(), self._console)
        self._open.add(pipe)
        self._new.put(pipe)
        os.write(self._wake_write, b"+")
        return write

    def drain(self, timeout_s: float) -> None:
        """Wait until every rank's output has ended and is written."""
        deadline = time.monotonic() + timeout_s
        while self._open and time.monotonic() < deadline:
            time.sleep(0.005)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(self._wake_read, CHUNK)
                    while not self._new.empty():
                        pipe = self._new.get()
                        self._selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)
                elif not key.data.read():
                    self._selector.unregister(key.fd)
                    key.data.close()
                    self._open.discard(key.data)


class Pipe:
    """One rank's output, on its way to the rank's file and to the console."""

    def __init__(self, descriptor: int, path: Path, prefix: bytes, console: Console) -> None:
        self.descriptor = descriptor
        self._file = path.open("ab", buffering=0)
        self._prefix = prefix
        self._console = console
        self._rest = b""

    def read(self) -> bool:
        """Take what is there. False at its end."""
        data = os.read(self.descriptor, CHUNK)
        with contextlib.suppress(OSError):  # a full disk must not stop the training
            self._file.write(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > CHUNK or (self._rest and not data):
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._console.put(1, self._prefix + line + b"\n")
        return bool(data)

    def close(self) -> None:
        """Let go of both ends."""
        os.close(self.descriptor)
        self._file.close()


def last_lines(path: Path, num_lines: int) -> list[str]:
    """The end of a log, for a final message; nothing where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-num_lines:]
    except OSError:
        return []


def last_error(path: Path) -> str:
    """A rank's own last word in its log: the line after a traceback, or ddptrain's; empty where there is none."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in last_lines(path, 200) if line.strip()]  # torch's prefix
    last = lines[-1] if lines else ""
    raised = "Traceback (most recent call last):" in lines and re.match(r"[A-Za-z_][\w.]*(: |$)", last)
    return last[:LONGEST_WORD] if raised or last.startswith("ddptrain: ") else ""
