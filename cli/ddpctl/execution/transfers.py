"""Transfers bytes between processes and files on this machine, and shows their progress."""

import os
import re
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, TextIO

from ddpctl.command import TIMED_OUT, Command, FilePart, Output, Transfer
from ddpctl.errors import CannotWriteError, NoInputError
from ddpctl.files.images import human_size
from ddpctl.text import cut, format_duration

_CHUNK = 1 << 20
_LOOK_S = 0.2  # how often the progress of a transfer is checked
_DRAW_S, _LINE_S = 0.1, 5.0  # how often the progress is shown on a terminal, and elsewhere
_LEAST_BAR = 5
_EXIT_S = 10.0
# A line of rsync --info=progress2: bytes, per cent, speed, time, and at the end of a file "(xfr#12, to-chk=...".
_RSYNC = re.compile(rb"\s([\d.,]+)\s+\d+%[^\r\n]*")
_RSYNC_FILES = re.compile(rb"xfr#(\d+)")


class Display:
    """Shows the total progress of parallel transfers: on a terminal in one updated line, and otherwise line by line."""

    def __init__(self, transfers: Sequence[Transfer], out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._totals = [(transfer.num_bytes, transfer.num_files) for transfer in transfers]
        self._done = [(0, 0)] * len(transfers)
        self._ended = 0
        self._lock = threading.Lock()
        self._terminal = self._out.isatty()
        self._began = self._drawn_at = time.monotonic()

    def update(self, number: int, num_bytes: int, num_files: int) -> None:
        """Record the progress of transfer ``number``. Show the total progress if it was last shown long enough ago."""
        with self._lock:
            self._done[number] = (num_bytes, num_files)
            if time.monotonic() - self._drawn_at > (_DRAW_S if self._terminal else _LINE_S):
                self._draw()

    def end(self, number: int, *, whole: bool) -> None:
        """Record that transfer ``number`` has ended. ``whole``: whether everything was transferred."""
        with self._lock:
            self._ended += whole
            if whole:
                self._done[number] = self._totals[number]

    def close(self) -> None:
        """Show the final progress. Without a terminal, do nothing if no progress has been shown before."""
        with self._lock:
            if self._totals and (self._terminal or self._drawn_at > self._began):
                self._draw()
                if self._terminal:
                    print(file=self._out, flush=True)

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        text = self.line(self._drawn_at - self._began, shutil.get_terminal_size().columns - 1 if self._terminal else 0)
        self._out.write(f"\r\x1b[K{text}" if self._terminal else f"{text}\n")
        self._out.flush()

    def line(self, took_s: float, width: int) -> str:
        """Return a line such as ``[####------] 62.0/100.0 MB, 1,240/2,000 files, 2/4 hosts, 31.0 MB/s, 1.2 s left``."""
        (num_bytes, num_files), (all_bytes, all_files) = (
            tuple(map(sum, zip(*pairs, strict=True))) for pairs in (self._done, self._totals)
        )
        part = num_bytes / all_bytes if all_bytes else 1.0
        moved, total = human_size(num_bytes), human_size(all_bytes)
        if moved.split()[1] == total.split()[1]:
            moved = moved.split()[0]
        parts = [f"{moved}/{total}", f"{num_files:,}/{all_files:,} files"]
        if len(self._totals) > 1:
            parts.append(f"{self._ended}/{len(self._totals)} hosts")
        if took_s > 0:
            parts.append(f"{human_size(int(num_bytes / took_s))}/s")
        if 0.0 < part < 1.0:
            parts.append(f"{format_duration(took_s * (1 - part) / part)} left")
        text = ", ".join(parts)
        if not width:
            return f"  {part:4.0%}  {text}"
        bar = min(30, width - len(text) - 5)
        filled = round(part * bar)
        drawn = f"[{'#' * filled}{'-' * (bar - filled)}] " if bar >= _LEAST_BAR else ""
        return cut(f"  {drawn}{text}", width, plain=True)


@contextmanager
def text_file(text: str | None) -> Iterator[IO[bytes]]:
    """Yield a file for the streams of a process that contains ``text``. No thread serves a pipe while it runs."""
    with TemporaryFile() as file:
        file.write((text or "").encode(errors="surrogateescape"))
        file.seek(0)
        yield file


def move(
    command: Command,
    transfer: Transfer,
    start: Callable[..., AbstractContextManager[Any]],
    display: Display,
    number: int,
) -> Output:
    """Run a command that transfers files. ``number`` is the index of the transfer in the display.

    ``start`` starts the process with the given stdin and stderr. Raises CannotWriteError, NoInputError and, if the
    program does not exist, FileNotFoundError.
    """
    started = False
    try:
        with ExitStack() as stack:
            error = stack.enter_context(text_file(None))
            reads = transfer.reads
            source = Path(reads.path).open("rb") if reads else text_file(command.stdin)  # noqa: SIM115
            stdin = stack.enter_context(source)
            stdin.seek(reads.start if reads else 0)
            process = stack.enter_context(start(stdin=stdin, stderr=error))
            started = True
            ends = stdin.fileno(), process.stdout.fileno()
            pump(transfer, *ends, command.timeout_s, lambda *done: display.update(number, *done))
            returncode = process.wait(_EXIT_S)
            display.end(number, whole=returncode == 0)
            error.seek(0)
            return Output(returncode=returncode, stderr=error.read().decode(errors="replace"))
    except TimeoutError:
        return Output(returncode=TIMED_OUT, stderr=f"no progress for {command.timeout_s:g} s")
    except OSError as failed:
        if transfer.reads and failed.filename == transfer.reads.path:
            raise NoInputError(f"cannot read {failed.filename}: {failed.strerror}") from None
        if not started and isinstance(failed, FileNotFoundError):
            raise
        raise CannotWriteError(f"cannot write {failed.filename or 'the fetched files'}: {failed.strerror}") from None


def pump(
    transfer: Transfer, stdin: int, stdout: int, stall_s: float | None, update: Callable[[int, int], None]
) -> None:
    """Read the output of a process until its end, and call ``update`` with the number of transferred bytes and files.

    ``stdin`` is the file that the process reads. Its position is the number of bytes sent. Raises TimeoutError if
    there is no progress for ``stall_s``, and OSError if a file cannot be written.
    """
    num_bytes = num_files = 0
    recent = b""  # the end of rsync's output
    moved_at = time.monotonic()
    with closing(_write(transfer.writes)) as files:
        next(files)
        while True:
            ready, _, _ = select.select([stdout], [], [], _LOOK_S)
            data = os.read(stdout, _CHUNK) if ready else b""
            if ready and not data:
                return
            before = (num_bytes, num_files)
            if transfer.writes:
                num_bytes, num_files = files.send(data)
            elif transfer.rsync_to:
                recent = (recent + data)[-1000:]
                for line in _RSYNC.finditer(recent):
                    num_bytes = int(re.sub(rb"\D", b"", line[1]))
                    num_files = max([num_files, *map(int, _RSYNC_FILES.findall(line[0]))])
            else:
                num_files += data.count(b"\n")
                num_bytes = os.lseek(stdin, 0, os.SEEK_CUR) - (transfer.reads.start if transfer.reads else 0)
            if data or (num_bytes, num_files) != before:
                moved_at = time.monotonic()
            elif stall_s is not None and time.monotonic() - moved_at > stall_s:
                raise TimeoutError
            update(num_bytes, num_files)


def _write(parts: Sequence[FilePart]) -> Generator[tuple[int, int], bytes]:
    """Write the bytes that are sent to this generator to the parts. Yield the number of bytes and of complete parts.

    Bytes after the end of the last part are dropped. Raises OSError, also for a write, with the path.
    """
    num_bytes = num_whole = 0
    data = b""
    for part in parts:
        path, rest = Path(part.path), part.length
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        with path.open("r+b", buffering=0) as file:
            file.truncate(part.start)
            file.seek(part.start)
            while rest:
                while not data:
                    data = yield num_bytes, num_whole
                try:
                    written = file.write(data[:rest])  # less than this if the disk becomes full
                except OSError as error:
                    raise OSError(error.errno, error.strerror, part.path) from None
                data = data[written:]
                num_bytes += written
                rest -= written
        num_whole += 1
    while True:
        yield num_bytes, num_whole
