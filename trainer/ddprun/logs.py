"""The output of ddprun and its ranks: every byte of a rank into its file, whole lines to stdout with their origin.

The files are always written. The reader of ddprun's stdout may be slow or stuck (a paused terminal): lines wait in a
bounded queue; when it is full, lines are left out of stdout, and counted, so that they do not block the training.
``LogFilter`` decides which lines of a crash reach stdout.
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
from collections.abc import Sequence
from pathlib import Path

from ddpwire.run_files import Outcome, rank_error, rank_log, read_error

CHUNK_BYTES = 1 << 16  # bytes read at once, and the longest line that is kept together on stdout
MAX_QUEUED_LINES = 10_000
READER_TIMEOUT_S = 1.0
TAIL_BYTES = 1 << 14
MAX_ERROR_CHARS = 200
NUM_LAST_LINES = 15
NUM_TRACEBACK_LINES = 200
MAX_LINES_AFTER = 20  # the end of a message, a hint, what atexit prints; after more the script has gone on
HELD_POLL_S = 0.5  # how often held lines are checked
DRAIN_S = 0.5  # for the output of ranks that have ended
HOLD_S = 8.0  # a rank may take 2 s to exit after its traceback, and the decision 2 s more; machines are busy
MAX_HELD_LINES = 2000  # a rank that prints so much does not crash
CRASH_START = re.compile(
    rb"(\[rank\d+\]: ?)?((  \+ Exception Group )?Traceback \(most recent call last\):|terminate called )"
    rb"|\[rank\d+\]:\[E"
)
HEADER = "Traceback (most recent call last):"
# Its header, also after a progress bar, or the end of rich's box; not that of an exception inside of another one.
TRACEBACK = re.compile(r"(?!Original | +\|).*" + re.escape(HEADER) + r"$|╰─+╯$")
EXCEPTION = re.compile(r"(  \| )?[^\W\d][\w.]*(: |:?$)")
SYNTAX_ERROR = re.compile(r"(SyntaxError|IndentationError|TabError): ")


class Console:
    """ddprun's stdout and stderr, written line by line by one thread, which ``start`` starts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: queue.Queue[tuple[int, bytes]] = queue.Queue(MAX_QUEUED_LINES)
        self._num_dropped = 0
        self._last: deque[bytes] = deque(maxlen=NUM_LAST_LINES)  # of the ranks' lines
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that writes the queued lines. Not earlier: a process that forks must not have threads."""
        with self._starting:
            if not self._thread:
                self._thread = threading.Thread(target=self._run, name="console", daemon=True)
                self._thread.start()

    def log(self, text: str) -> None:
        """Write a line of ddprun's own to stderr."""
        self.put(2, f"[{self._name}] {text}\n".encode())

    def log_now(self, text: str) -> None:
        """Write it in this thread, before ``start``, as long as the streams do not block."""
        self.log(text)
        with contextlib.suppress(OSError, ValueError):  # a stream is closed
            while not self._thread and self._lines.qsize() and select.select([], [1, 2], [], 0)[1] == [1, 2]:
                self._write()

    def put(self, descriptor: int, line: bytes) -> None:
        """Queue a line. If the queue is full, wait a second for the reader, but only once while it is stuck."""
        try:
            self._lines.put((descriptor, line), timeout=0 if self._num_dropped else READER_TIMEOUT_S)
        except queue.Full:
            self._num_dropped += 1
            return
        if descriptor == 1:
            self._last.append(line)
        if self._num_dropped:
            note = f"[{self._name}] {self._num_dropped} lines were left out here; the ranks' logs have them\n"
            with contextlib.suppress(queue.Full):
                self._lines.put_nowait((2, note.encode()))
                self._num_dropped = 0

    def recently_shown(self, line: str) -> bool:
        """Whether ``line`` is among the last lines of the ranks on stdout."""
        return line in [shown.decode(errors="replace") for shown in tuple(self._last)]

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
        with contextlib.suppress(OSError):  # the reader is gone: only the files remain
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
        self._lock = threading.Lock()  # held while lines are passed on: by the thread, or by the decision
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    def open(self, rank: int, path: Path) -> int:
        """Return a descriptor for the rank to write to; the caller closes it once the rank has it. Raises OSError."""
        read, write = os.pipe()
        pipe = Pipe(read, path, rank, f"[node{self._node} rank{rank}] ".encode(), self._console)
        self._open.add(pipe)
        self._pipes.append(pipe)
        self._new.put(pipe)
        os.write(self._wake_write, b"+")
        return write

    def catch_up(self, rank: int, timeout_s: float) -> None:
        """Wait until all that a rank has written so far is in its file, or for ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        pipes = [pipe for pipe in self._pipes if pipe.rank == rank]
        while time.monotonic() < deadline and any(pipe in self._open and pipe.has_data for pipe in pipes):
            time.sleep(0.002)
        with self._lock:  # the thread may have taken the data out of the pipe, and not written it yet
            pass

    def show_failed_rank(self, outcome: Outcome) -> None:
        """Show the held lines of the rank that failed first, and no more lines of its peers.

        After a stop, or a lost node, all lines are shown: there is no other information.
        """
        has_culprit = outcome.rank is not None and outcome.cause not in ("ok", "stopped")
        with self._lock:
            for pipe in self._pipes:
                if pipe.rank != outcome.rank and has_culprit:
                    pipe.log_filter.suppress()
            self._show_held()

    def end_attempt(self) -> None:
        """Show all held lines: no decision follows."""
        with self._lock:
            self._show_held()

    def close_attempt(self, *, restarting: bool) -> None:
        """End the attempt; log where the suppressed lines are, unless the ranks start again at once."""
        if not restarting:
            self.drain(DRAIN_S)
        with self._lock:
            paths = [pipe.path for pipe in self._pipes if pipe.log_filter.num_suppressed]
            self._pipes.clear()
        if paths and not restarting:
            names = [path.name for path in paths]
            logs = ", ".join(names) if len(names) <= 8 else f"{names[0]} to {names[-1]}"
            self._console.log(f"the output of the other ranks, which failed after it, is in {paths[0].parent}: {logs}")

    def _show_held(self) -> None:
        for pipe in self._pipes:
            pipe.show(pipe.log_filter.release())

    def drain(self, timeout_s: float) -> None:
        """Wait until the output of all ranks has ended and is written."""
        deadline = time.monotonic() + timeout_s
        while self._open and time.monotonic() < deadline:
            time.sleep(0.005)

    def _run(self) -> None:
        while True:
            is_holding = any(pipe.log_filter.is_holding for pipe in tuple(self._pipes))
            events = self._selector.select(HELD_POLL_S if is_holding else None)
            with self._lock:
                self._process(events)

    def _process(self, events: list[tuple[selectors.SelectorKey, int]]) -> None:
        for pipe in tuple(self._pipes):
            pipe.show(pipe.log_filter.release_due(time.monotonic()))
        for key, _ in events:
            if key.data is None:
                os.read(self._wake_read, CHUNK_BYTES)
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
        self.log_filter = LogFilter()
        self._file = path.open("ab", buffering=0)
        self._prefix = prefix
        self._console = console
        self._rest = b""

    @property
    def has_data(self) -> bool:
        """Whether there is something to be read, or the end of file."""
        return bool(select.select([self.descriptor], [], [], 0)[0])

    def read(self) -> bool:
        """Read what is available. False at the end of file."""
        data = os.read(self.descriptor, CHUNK_BYTES)
        with contextlib.suppress(OSError):  # a full disk must not stop the training
            self._file.write(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > CHUNK_BYTES or (self._rest and not data):
            lines, self._rest = [*lines, self._rest], b""
        self.show(self.log_filter.accept(lines, time.monotonic()))
        return bool(data)

    def show(self, lines: list[bytes]) -> None:
        """Pass lines on to the console."""
        for line in lines:
            self._console.put(1, self._prefix + strip_torch_prefix(line, self.rank) + b"\n")

    def close(self) -> None:
        """Close both ends."""
        os.close(self.descriptor)
        self._file.close()


def strip_torch_prefix(line: bytes, rank: int) -> bytes:
    """Return a rank's line without torch's own prefix ``[rank3]: ``, since ddprun adds its own."""
    return re.sub(rb"^\[rank%d\]: ?" % rank, b"", line)


def last_lines(path: Path, num_lines: int) -> list[str]:
    """Return the last lines of a log; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-num_lines:]
    except OSError:
        return []


def last_error(node_dir: Path, rank: int, status: int) -> str:
    """Return, in a line, the error that ended a rank with ``status``; empty: it left none.

    It is in the rank's error file. A rank that was executed, and does not use torch's ``record``, has none: then it is
    the last traceback of the log, if Python has exited with 1, as it does after an uncaught exception. Where lines
    follow the traceback, or the rank has chosen its exit code, the script has caught the exception, or may have: so
    the text says where it is from.
    """
    message = read_error(node_dir / rank_error(rank))
    if message:
        return _shorten(first_words(message.splitlines()))
    if status != 1:
        return ""
    log = last_lines(node_dir / rank_log(rank), NUM_TRACEBACK_LINES)
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in log]  # torch's prefix
    start = find_exception(lines)
    if start is None:
        return ""
    error = first_words(lines[start:])
    later = [line for line in lines[start + 1 :] if line.strip() and not line[0].isspace()]
    if len(later) > MAX_LINES_AFTER:
        return ""
    ended_it = message is None and not later
    return _shorten(error if ended_it else f"the last traceback in its log: {error}")


def find_exception(lines: Sequence[str]) -> int | None:
    """Return where the last uncaught exception of a log is: the line after its traceback; None: there is none."""
    for start in range(len(lines) - 1, -1, -1):
        if TRACEBACK.match(lines[start]):
            after = range(start + 1, len(lines))
            return next((number for number in after if EXCEPTION.match(lines[number])), None)
        if SYNTAX_ERROR.match(lines[start]) and start and lines[start - 1].startswith("    "):
            return start  # of the script itself: Python prints no header
    return None


def first_words(lines: Sequence[str]) -> str:
    """Return an error's message in a line: its first line, and what that announces.

    A first line that ends with a colon announces the next one. The error of a DataLoader's worker and of a spawned
    process holds the traceback of that process, NCCL's ends with "Last error:" and its text.
    """
    words = [line for line in (re.sub(r"^[ |+]*", "", line).strip() for line in lines) if line]
    if not words:
        return ""
    header = next((number for number, line in enumerate(lines) if line.endswith(HEADER)), len(lines))
    inner = next((number for number in range(header, len(lines)) if EXCEPTION.match(lines[number])), None)
    if inner is not None:
        return f"{words[0].rstrip('.:')}: {first_words(lines[inner:])}"
    first = f"{words[0]} {words[1]}" if words[0].endswith(":") and len(words) > 1 else words[0]
    if "Last error:" in words[1:-1]:
        first = f"{first}: {words[words.index('Last error:') + 1]}"
    return first


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[: MAX_ERROR_CHARS - 1]}…"


class LogFilter:
    """Holds back the lines of a crash until it is known which rank failed first. Pure.

    When one rank fails, its peers lose their connections and each prints a traceback about it before the first failure
    is known: seven of eight tracebacks are consequences, and they hide the cause. So from the first line of a crash on,
    a rank's lines are held back from the console. The decision releases those of the rank that failed first, right
    before the reason, and leaves the others in their files. If no decision comes in time (the script caught its error,
    or several ranks did) all lines are shown. Lines before a crash are never held, and none when a run is stopped.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._until: float | None = None  # None: nothing is held
        self._suppressed = self._released = False
        self.num_suppressed = 0

    def accept(self, lines: list[bytes], now: float) -> list[bytes]:
        """Take new lines; return those that may be shown now."""
        if self._suppressed:
            self.num_suppressed += len(lines)
            return []
        if self._released:
            return lines
        if self._until is None:
            first = next((number for number, line in enumerate(lines) if CRASH_START.match(line)), None)
            if first is None:
                return lines
            self._until = now + HOLD_S
            self._held = lines[first:]
            return lines[:first]
        self._held += lines
        return self.release_due(now)

    def release_due(self, now: float) -> list[bytes]:
        """Return the held lines if they have been held long enough."""
        if self._until is not None and (now > self._until or len(self._held) > MAX_HELD_LINES):
            return self._release()
        return []

    def _release(self) -> list[bytes]:
        held, self._held, self._until = self._held, [], None
        return held

    def suppress(self) -> None:
        """Drop the held lines and all that follow: they are consequences of another rank's failure."""
        self.num_suppressed += len(self._release())
        self._suppressed = True

    def release(self) -> list[bytes]:
        """Return the held lines; hold none from now on. Suppressed lines stay suppressed."""
        self._released = True
        return self._release()

    @property
    def is_holding(self) -> bool:
        """Whether lines are held."""
        return self._until is not None
