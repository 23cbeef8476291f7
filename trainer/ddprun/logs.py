"""What the ranks and ddprun itself say: every byte into the rank's file, every whole line to stdout with its origin.

The file is the truth and is always written. Whoever reads ddprun's stdout may be slow or stuck (a paused terminal):
lines wait for them in a bounded queue, and past that are left out of stdout, and counted, lest they block the training.
What ranks say as they go down is sorted by ``manners``.
"""

import contextlib
import os
import queue
import re
import select
import selectors
import threading
import time
from collections import deque
from pathlib import Path

from ddprun.manners import Manners
from ddpwire.outcome import Outcome

CHUNK = 1 << 16  # bytes read at once, and the longest line that is kept together on stdout
BACKLOG = 10_000  # lines
PATIENCE_S = 1.0
TAIL_BYTES = 1 << 14
LONGEST_WORD = 200
NUM_LAST_LINES = 15
LOOK_S = 0.5  # how often what is held is looked at
LAST_WORDS_S = 0.5  # of ranks that have ended


class Console:
    """ddprun's stdout and stderr, written by one thread, one line at a time; until ``start`` there is none."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: queue.Queue[tuple[int, bytes]] = queue.Queue(BACKLOG)
        self._num_left_out = 0
        self._last: deque[bytes] = deque(maxlen=NUM_LAST_LINES)  # of the ranks' lines
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

    def say_at_once(self, text: str) -> None:
        """The same before ``start``, written by this thread, as long as the reader need not be waited for."""
        self.say(text)
        with contextlib.suppress(OSError, ValueError):  # a stream is closed
            while not self._thread and self._lines.qsize() and select.select([], [1, 2], [], 0)[1] == [1, 2]:
                self._write()

    def put(self, descriptor: int, line: bytes) -> None:
        """Write a line as soon as may be. It waits a second at the most, and only once for a reader that is stuck."""
        try:
            self._lines.put((descriptor, line), timeout=0 if self._num_left_out else PATIENCE_S)
        except queue.Full:
            self._num_left_out += 1
            return
        if descriptor == 1:
            self._last.append(line)
        if self._num_left_out:
            note = f"[{self._name}] {self._num_left_out} lines were left out here; the ranks' logs have them\n"
            with contextlib.suppress(queue.Full):
                self._lines.put_nowait((2, note.encode()))
                self._num_left_out = 0

    def has_just_said(self, line: str) -> bool:
        """Whether it is among the last lines of the ranks that a person has before their eyes."""
        return line in [said.decode(errors="replace") for said in tuple(self._last)]

    def drain(self, timeout_s: float) -> None:
        """Wait until all is written, unless the reader is stuck."""
        self.start()
        deadline = time.monotonic() + timeout_s
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)

    def _run(self) -> None:
        while True:
            self._write()

    def _write(self) -> None:
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
        self._pipes: list[Pipe] = []  # of the present attempt
        self._turn = threading.Lock()  # of who hands lines on: the thread, or the verdict
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    def open(self, rank: int, path: Path) -> int:
        """A descriptor for the rank to write to, to be closed here once the rank has it. Raises OSError."""
        read, write = os.pipe()
        pipe = Pipe(read, path, rank, f"[node{self._node} rank{rank}] ".encode(), self._console)
        self._open.add(pipe)
        self._pipes.append(pipe)
        self._new.put(pipe)
        os.write(self._wake_write, b"+")
        return write

    def judge(self, outcome: Outcome) -> None:
        """Show what was held of the rank that is to blame, and no more of its peers' words.

        Of a stop all is shown, and of a lost node: what the others say is then all there is.
        """
        echoes = outcome.rank is not None and outcome.cause not in ("ok", "stopped")
        with self._turn:
            for pipe in self._pipes:
                if pipe.rank != outcome.rank and echoes:
                    pipe.manners.silence()
            self._show_held()

    def end_attempt(self) -> None:
        """There is no more to be judged of these ranks: what is held is shown."""
        with self._turn:
            self._show_held()

    def forget(self, *, in_a_hurry: bool) -> None:
        """The attempt is over: say where the words are that were not shown, unless the ranks start again at once."""
        if not in_a_hurry:
            self.drain(LAST_WORDS_S)
        with self._turn:
            paths = [pipe.path for pipe in self._pipes if pipe.manners.num_left_out]
            self._pipes.clear()
        if paths and not in_a_hurry:
            names = [path.name for path in paths]
            logs = ", ".join(names) if len(names) <= 8 else f"{names[0]} to {names[-1]}"
            self._console.say(f"what other ranks said as they went down is in {paths[0].parent}: {logs}")

    def _show_held(self) -> None:
        for pipe in self._pipes:
            pipe.show(pipe.manners.acquit())

    def drain(self, timeout_s: float) -> None:
        """Wait until every rank's output has ended and is written."""
        deadline = time.monotonic() + timeout_s
        while self._open and time.monotonic() < deadline:
            time.sleep(0.005)

    def _run(self) -> None:
        while True:
            holds = any(pipe.manners.holds for pipe in tuple(self._pipes))
            events = self._selector.select(LOOK_S if holds else None)
            with self._turn:
                self._hand_on(events)

    def _hand_on(self, events: list[tuple[selectors.SelectorKey, int]]) -> None:
        for pipe in tuple(self._pipes):
            pipe.show(pipe.manners.due(time.monotonic()))
        for key, _ in events:
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

    def __init__(self, descriptor: int, path: Path, rank: int, prefix: bytes, console: Console) -> None:
        self.descriptor = descriptor
        self.path = path
        self.rank = rank
        self.manners = Manners()
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
        self.show(self.manners.hear(lines, time.monotonic()))
        return bool(data)

    def show(self, lines: list[bytes]) -> None:
        """Hand them on to the console."""
        for line in lines:
            self._console.put(1, self._prefix + without_torchs_prefix(line, self.rank) + b"\n")

    def close(self) -> None:
        """Let go of both ends."""
        os.close(self.descriptor)
        self._file.close()


def without_torchs_prefix(line: bytes, rank: int) -> bytes:
    """A rank's line without the ``[rank3]: `` of torch's own, where ours stands before it."""
    return re.sub(rb"^\[rank%d\]: ?" % rank, b"", line)


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
