"""The output of several sources on one stream: complete lines, and unfinished lines such as progress bars.

A progress bar is a line whose states are separated by carriage returns. If there is only one source and its lines are
not marked with a name, its text is passed on unchanged. Otherwise, the last state of each progress bar is written at
most once a second, and any other line is written when it is complete. If the line of one source is unfinished, the text
of another source begins on a new line.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ddpwire.run_files import open_regular

STATE_INTERVAL_S = 1.0  # a progress bar may change a hundred times per second
BLOCK_BYTES = 1 << 20


class MergedOutput:
    """A stream that several sources share. ``write`` writes to it.

    ``num_sources`` is the number of sources, or 0 if it is not known yet.
    """

    def __init__(self, write: Callable[[bytes], object], *, num_sources: int = 0) -> None:
        self.write = write
        self.num_sources = num_sources
        self.lock = threading.Lock()
        self.sources: set[Source] = set()  # the open sources
        self.unfinished: Source | None = None  # the source whose unfinished line is at the end of the stream

    def add_source(self, mark: Callable[[bytes], bytes] | None = None) -> "Source":
        """Return a new source. ``mark`` returns a line with the source's name added. Without it, lines have no name."""
        source = Source(self, mark)
        with self.lock:
            self.sources.add(source)
        return source


class Source:
    """One source of a ``MergedOutput``."""

    def __init__(self, output: MergedOutput, mark: Callable[[bytes], bytes] | None) -> None:
        self._output, self._mark = output, mark
        self._rest = b""  # the unfinished line, as far as it is still needed
        self._begun = False  # whether a part of the unfinished line has been written
        self._state = b""  # the last state of a bar that was written
        self._state_at = -STATE_INTERVAL_S

    def add(self, data: bytes) -> None:
        """Write the complete lines of ``data``. Write the state of a progress bar at most once a second.

        Call this with empty data to write the last state of a progress bar that has received no data for a while.
        """
        with self._output.lock:
            *lines, self._rest = (self._rest + data).split(b"\n")
            text = b"".join([*map(self._end_line, lines), self._show_unfinished()])
            if text:
                self._output.write(text)

    def close(self) -> None:
        """Close the source, and end its last line."""
        with self._output.lock:
            if self._rest or self._begun:
                self._output.write(self._end_line(self._rest))
            self._rest = b""
            self._output.sources.discard(self)

    @property
    def _passes_on(self) -> bool:
        return self._mark is None and max(self._output.num_sources, len(self._output.sources)) == 1

    def _end_line(self, line: bytes) -> bytes:
        begun, self._begun = self._begun, False
        if begun and self._output.unfinished is self:
            self._output.unfinished = None
            if self._passes_on or b"\r" not in line:
                return line + b"\n"
            state = last_state(line)
            return b"\n" if state == self._state else b"\r" + self._marked(state) + b"\n"
        text = last_state(line) if begun or self._mark else line  # a carriage return would overwrite the mark
        return self._start_line() + self._marked(text) + b"\n"

    def _show_unfinished(self) -> bytes:
        if not self._rest:
            return b""
        if self._passes_on:
            text, self._rest = self._rest, b""
        else:
            state, now = last_state(self._rest), time.monotonic()
            is_new = not self._begun or state != self._state
            if b"\r" not in self._rest or not state or not is_new or now - self._state_at < STATE_INTERVAL_S:
                return b""
            self._rest = b"\r" + state + b"\r" * self._rest.endswith(b"\r")
            self._state, self._state_at = state, now
            text = b"\r" * (self._output.unfinished is self) + self._marked(state)
        if self._output.unfinished is not self:
            text = self._start_line() + text
        self._begun, self._output.unfinished = True, self
        return text

    def _start_line(self) -> bytes:
        start = b"\n" if self._output.unfinished else b""
        self._output.unfinished = None
        return start

    def _marked(self, line: bytes) -> bytes:
        return self._mark(line) if self._mark else line


def last_state(line: bytes) -> bytes:
    """Return what a terminal shows of a line that contains carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class LogTail:
    """A growing log file, which is read one block at a time. It may not exist yet."""

    def __init__(self, path: Path, source: Source, tail: int | None = None) -> None:
        """Raises OSError. ``tail``: begin with so many last lines of a file that exists already."""
        self._path, self._source = path, source
        self._file: BinaryIO | None = None
        with contextlib.suppress(FileNotFoundError):
            self._file = open_regular(path)
            if tail is not None:
                self._file.seek(start_of_last_lines(self._file, tail))

    def pass_on(self) -> None:
        """Print what was added to the log. If another file has replaced the log, print that file as well."""
        replacement = None
        with contextlib.suppress(OSError):
            if self._file is None or not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                replacement = open_regular(self._path)
        while self._file and (block := self._file.read(BLOCK_BYTES)):
            self._source.add(block)
        self._source.add(b"")
        if replacement:
            if self._file:
                self._file.close()
            self._file = replacement
            self.pass_on()

    def close(self) -> None:
        """End the last line of the output, and close the log."""
        self._source.close()
        if self._file:
            self._file.close()


def start_of_last_lines(file: BinaryIO, count: int) -> int:
    """Return the position at which the last ``count`` lines of a file begin, including an incomplete last line."""
    end = position = file.seek(0, os.SEEK_END)
    if count <= 0:
        return end
    while position:
        size = min(BLOCK_BYTES, position)
        position = file.seek(position - size)
        block = file.read(size)
        index = size - (position + size == end and block.endswith(b"\n"))  # a newline at the end starts no line
        while count and (index := block.rfind(b"\n", 0, index)) >= 0:
            count -= 1
        if not count:
            return position + index + 1
    return 0
