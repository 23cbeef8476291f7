"""The output of this node's ranks. It is written to each rank's log file and shown on the console (log_view.py).

If ddprun's stdout and stderr lead to the same place, such as a terminal, a rank's stdout and stderr share one stream,
which keeps the order of their lines. Otherwise a rank has two streams, and its file contains the lines of both in the
order in which ddprun read them. If ddprun's output is a terminal, a rank that is shown byte by byte writes to a
pseudo-terminal with the same size and modes. Its stdin is the terminal itself.
"""

import fcntl
import os
import pty
import queue
import select
import selectors
import termios
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddprun.output.console import NUM_LAST_LINES, Console
from ddprun.output.log_view import MAX_LINE_BYTES, View, strip_torch_prefix
from ddprun.output.rank_errors import last_lines
from ddprun.settings.node_config import NodeConfig
from ddprun.system import file_writer
from ddprun.system.file_writer import FileWriter
from ddpwire.merged_output import last_state
from ddpwire.run_files import Outcome, append_bounded, rank_log, timed_log

CHUNK_BYTES = 1 << 16  # read at once
TICK_S = 0.25  # how often views and unfinished lines are updated
UNFINISHED_S = 1.0  # after this, an unfinished line is written to the file, although the other stream may split it
MAX_UNFINISHED_BYTES = 1 << 20
MAX_BYTES = 1 << 25  # of a log with times; there are at most two
DRAIN_S = 0.5  # for the output of ranks that have ended
CATCH_UP_S = 0.5  # for the last lines of a rank that has ended, which are read within milliseconds


class RankLogs:
    """The streams of this node's ranks. One thread reads all of them."""

    def __init__(self, console: Console, config: NodeConfig, files: FileWriter | None = None) -> None:
        self._console, self._files = console, files or FileWriter()
        self._config = config
        self._modes: list[Any] | None = None  # of ddprun's terminal: a rank may change them, as line editors do
        with suppress(termios.error):
            self._modes = termios.tcgetattr(0)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._open: set[Stream] = set()
        self._new: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self._streams: list[Stream] = []  # of the present attempt
        self.starts: dict[int, int] = {}  # rank → the size of its log when the present attempt began
        self._lock = threading.Lock()  # held while text is passed on, by the thread or after a decision
        self.in_order = console.is_one_place  # whether a rank's file has its lines in the order of writing
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    def open(self, rank: int, local_rank: int, path: Path) -> tuple[int, int, int]:
        """Return a rank's stdin, stdout and stderr, which the caller must pass to it and then close. Raises OSError."""
        targets = (1,) if self.in_order else (1, 2)
        file = RankFile(path, num_streams=len(targets), files=self._files)
        self.starts[rank] = file.start
        prefix, shown = self._config.prefix(rank).encode(), self._config.shown_local_ranks
        is_raw, is_hidden = self._config.shows_raw(rank), shown is not None and local_rank not in shown
        ends = []
        for target in targets:
            view = View(self._console, target, prefix, rank, raw=file if is_raw else None, hidden=is_hidden)
            read, write = open_pair(target) if is_raw else os.pipe()
            ends.append(write)
            timed = TimedLog(path.parent / timed_log(rank), self._config.node_rank, rank, self._files)
            stream = Stream(read, target, rank, file, view, timed)
            self._open.add(stream)
            self._streams.append(stream)
            self._new.put(stream)
        os.write(self._wake_write, b"+")
        stderr = ends[1] if len(ends) == 2 else os.dup(ends[0])
        # In the background, the kernel would let the rank read what is typed for the shell, from its own session.
        reads_stdin = self._config.reads_stdin(rank) and _in_foreground()
        return os.dup(0) if reads_stdin else os.open(os.devnull, os.O_RDONLY), ends[0], stderr

    def resize(self) -> None:
        """Pass the size of ddprun's terminal on to the ranks' pseudo-terminals."""
        for stream in tuple(self._open):
            copy_size(stream.target, stream.descriptor)

    def catch_up(self, rank: int) -> None:
        """Wait until the rank's file contains all that the rank has written so far, but at most ``CATCH_UP_S``."""
        deadline = time.monotonic() + CATCH_UP_S
        streams = [stream for stream in self._streams if stream.rank == rank]
        while time.monotonic() < deadline:
            with self._lock:  # the thread closes the descriptors of streams that have ended
                descriptors = [stream.descriptor for stream in streams if stream in self._open]
                if not select.select(descriptors, [], [], 0)[0]:
                    break
            time.sleep(0.002)
        with self._lock:  # the thread may have read the data, and not written it yet
            for stream in streams:
                stream.flush()
        self._files.flush(CATCH_UP_S)

    def show_failed_rank(self, outcome: Outcome) -> None:
        """Show the held lines of the rank that failed first, and no further lines of the other ranks.

        After a stop or the loss of a node, no rank failed first, so show the held lines of all ranks.
        """
        has_culprit = outcome.rank is not None and outcome.cause not in ("ok", "stopped")
        with self._lock:
            for stream in self._streams:
                if stream.rank != outcome.rank and has_culprit:
                    stream.view.suppress()
            self._release()

    def end_attempt(self) -> None:
        """Show all held lines, because the nodes will no longer decide which rank failed first."""
        self._restore_modes()
        with self._lock:
            self._release()

    def close_attempt(self, *, restarting: bool) -> None:
        """End the attempt. Log where the suppressed lines are, unless the ranks are restarted at once."""
        if not restarting:
            self.drain(DRAIN_S)
        self._restore_modes()
        with self._lock:
            paths = [*dict.fromkeys(stream.file.path for stream in self._streams if stream.view.num_suppressed)]
            self._streams.clear()
        if paths and not restarting:
            names = [path.name for path in paths]
            logs = ", ".join(names) if len(names) <= 8 else f"{names[0]} to {names[-1]}"
            self._console.log(f"some lines of other ranks are not shown here; they are in {paths[0].parent}: {logs}")

    def show_last_lines(self, outcome: Outcome, node_dir: Path) -> None:
        """Show the last log lines of a failed rank of this node, unless the console has just shown them."""
        rank, config = outcome.rank, self._config
        is_of_this_node = outcome.node == config.node_rank and outcome.cause != "stopped"
        if rank is None or not is_of_this_node or config.shows_raw(rank):
            return
        path, start = node_dir / rank_log(rank), self.starts[rank]
        log: list[str] = self._files.read(last_lines, path, NUM_LAST_LINES, start, unknown=[])
        shown = [f"{config.prefix(rank)}{strip_torch_prefix(line.encode(), rank).decode()}\n" for line in log]
        if shown and not self._console.recently_shown(shown[-1]):
            for line in shown:
                self._console.put(1, line.encode())

    def _restore_modes(self) -> None:
        if self._modes and _in_foreground():
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(0, termios.TCSADRAIN, self._modes)

    def _release(self) -> None:
        for stream in self._streams:
            stream.view.release()

    def drain(self, timeout_s: float) -> None:
        """Wait until the output of all ranks has ended and is written, but at most ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while self._open and time.monotonic() < deadline:
            time.sleep(0.005)
        self._files.flush(timeout_s)

    def _run(self) -> None:
        while True:
            waits = any(stream.needs_tick for stream in self._present())
            events = self._selector.select(TICK_S if waits else None)
            with self._lock:
                self._process(events)

    def _present(self) -> set["Stream"]:
        """Return all streams of this attempt, and the streams of earlier attempts that are still open."""
        return {*self._streams, *self._open}

    def _process(self, events: list[tuple[selectors.SelectorKey, int]]) -> None:
        now = time.monotonic()
        for stream in self._present():
            stream.tick(now)
        for key, _ in sorted(events, key=lambda event: event[0].fd):  # stdout before stderr
            if key.data is None:
                os.read(self._wake_read, CHUNK_BYTES)
                while not self._new.empty():
                    stream = self._new.get()
                    self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)
            elif not key.data.read(now):
                self._selector.unregister(key.fd)
                self._open.discard(key.data)  # before its descriptor is closed: resize() takes no lock
                key.data.close()


class RankFile:
    """A rank's log file, to which its streams append."""

    def __init__(self, path: Path, *, num_streams: int, files: FileWriter | None = None) -> None:
        """Open the file, which waits for the disk. Raises OSError."""
        self.path, self._files = path, files or FileWriter()
        self.is_of_one_stream = num_streams == 1
        self._num_open = num_streams
        self.start, last = self._files.call(file_writer.open_file, path)
        # The stream whose unfinished line is at the file's end. The previous attempt may have been killed in one.
        self._unfinished: object = self if last not in (b"", b"\n") else None

    def write(self, stream: object, text: bytes) -> None:
        """Append ``text``, on a new line if the file ends with an unfinished line of another stream."""
        if self._unfinished not in (None, stream):
            text = b"\n" + text
        self._unfinished = None if text.endswith(b"\n") else stream
        self._files.submit(file_writer.append, self.path, text, waits=True)  # on a full disk, lines are lost

    def close(self) -> None:
        """Record that one stream is closed. After the last one, close the file."""
        self._num_open -= 1
        if not self._num_open:
            self._files.submit(file_writer.close_file, self.path)


class TimedLog:
    """A log of one stream of a rank, or of ddprun itself (``rank`` is None), with lines ``TIME [node0 rank1] LINE``.

    TIME is the UTC time at which ddprun read the end of the line.
    """

    def __init__(self, path: Path, node: int, rank: int | None = None, files: FileWriter | None = None) -> None:
        self._path, self._rank, self._files = path, rank, files or FileWriter()
        self.name = f"node{node}{'' if rank is None else f' rank{rank}'}"
        self._rest = b""
        self._files.submit(path.parent.mkdir, 0o777, False, True)

    def add(self, data: bytes) -> None:
        """Add data that was read. Empty data ends the last line. On a full disk, lines are lost."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > MAX_LINE_BYTES):
            lines, self._rest = [*lines, self._rest], b""
        if lines:
            start = f"{datetime.now(UTC).isoformat(timespec='milliseconds')[:-6]}Z [{self.name}] ".encode()
            text = b"".join(start + strip_torch_prefix(last_state(line), self._rank) + b"\n" for line in lines)
            self._files.submit(append_bounded, self._path, text, MAX_BYTES, waits=self._rank is not None)


class Stream:
    """Reads a rank's stdout, its stderr or both, writes the data to the rank's file, and shows it."""

    def __init__(self, descriptor: int, target: int, rank: int, file: RankFile, view: View, timed: TimedLog) -> None:
        self.descriptor = descriptor
        self.target = target  # the corresponding descriptor of ddprun itself: 1 or 2
        self.rank = rank
        self.view = view
        self.file, self._timed = file, timed
        # Thousands of small chunks may wait for the console.
        self._chunk_bytes = 1 << 12 if view.raw else CHUNK_BYTES
        self._rest = b""  # an unfinished line, not in the file yet
        self._rest_since = 0.0

    @property
    def needs_tick(self) -> bool:
        """Whether ``tick`` must be called although no new data arrives."""
        return bool(self._rest) or self.view.needs_tick

    def read(self, now: float) -> bool:
        """Read the available data. Return False if the stream has ended."""
        try:
            data = os.read(self.descriptor, self._chunk_bytes)
        except OSError:  # a pseudo-terminal that nobody has open any more
            data = b""
        whole, newline, rest = (self._rest + data).rpartition(b"\n")
        if newline:
            self.file.write(self, whole + newline)
        if newline or not self._rest:
            self._rest_since = now
        self._rest = rest
        if not data or len(rest) > MAX_UNFINISHED_BYTES or self.file.is_of_one_stream:
            self.flush()
        self._timed.add(data)
        self.view.accept(data, now)
        return bool(data)

    def tick(self, now: float) -> None:
        """Write an unfinished line if it is old enough at the time ``now``, and update the view."""
        if now >= self._rest_since + UNFINISHED_S:
            self.flush()
        self.view.tick(now)

    def flush(self) -> None:
        """Write the unfinished line, if any, to the file."""
        if self._rest:
            self.file.write(self, self._rest)
            self._rest = b""

    def close(self) -> None:
        """Close the descriptor, and the rank's file if it has no other open stream."""
        os.close(self.descriptor)
        self.file.close()


def open_pair(like: int) -> tuple[int, int]:
    """Open a pseudo-terminal. Return ddprun's end and the rank's end.

    If ``like`` is not a terminal, or no pseudo-terminal can be opened, open a pipe instead.
    """
    if os.isatty(like):
        with suppress(OSError, termios.error):  # no more pseudo-terminals, or no /dev/pts
            modes = termios.tcgetattr(like)
            modes[1] &= ~termios.OPOST  # of the output: the terminal itself turns "\n" into "\r\n"
            read, write = pty.openpty()
            termios.tcsetattr(write, termios.TCSANOW, modes)
            copy_size(like, read)
            return read, write
    return os.pipe()


def copy_size(source: int, target: int) -> None:
    """Give ``target`` the size of ``source``. Do nothing if one of the two is not a terminal."""
    with suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(8))  # rows, columns, and pixels (tty_ioctl(4))
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return True  # stdin is no terminal, or not the one that controls this session
