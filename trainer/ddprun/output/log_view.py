"""Shows the output of ranks on ddprun's console.

The bytes of a rank that is being debugged, or is the only one that is shown, are shown immediately. Of other ranks,
complete lines are shown, prefixed with their rank, and the latest state of a progress bar, which overwrites its own
line with a carriage return.

When one rank fails, the other ranks lose their connections, and each prints a traceback before ddprun knows of the
first failure. These tracebacks would hide the cause. So a rank's lines are held from the first line of a crash on. As
soon as the nodes agree on the rank that failed first, the lines of this rank are shown. The held lines of the other
ranks remain only in their log files. If the nodes name no rank in time, or the run is stopped, all lines are shown.
"""

import re

from ddprun.output.console import Console
from ddpwire.merged_output import last_state

MAX_LINE_BYTES = 1 << 16  # the longest line that is kept together
PROGRESS_S = 1.0  # between two states of a progress bar
HOLD_S = 8.0  # a rank may exit 2 s after its traceback, the decision may take 2 s more, and machines are busy
MAX_HELD_LINES = 2000  # a rank that prints more than this is not crashing
CRASH_START = re.compile(
    rb"(\[rank\d+\]: ?)*((  \+ Exception Group )?Traceback \(most recent call last\):|terminate called )"
    rb"|\[rank\d+\]:\[E"
)
TRACEBACK = b"Traceback (most recent call last):"


def strip_torch_prefix(line: bytes, rank: int | None) -> bytes:
    """Remove torch's prefixes ``[rank3]: `` from the start of a line, because ddprun adds its own prefix."""
    return line if rank is None else re.sub(rb"^(\[rank%d\]: ?)+" % rank, b"", line)


class View:
    """What the console shows of a stream of a rank."""

    def __init__(
        self, console: Console, descriptor: int, prefix: bytes, rank: int, *, raw: object = None, hidden: bool = False
    ) -> None:
        """If ``raw`` is set, each byte is shown immediately; all streams with the same ``raw`` may continue a line."""
        self._console, self._descriptor, self._prefix, self._rank = console, descriptor, prefix, rank
        self.raw, self._is_hidden = raw, hidden
        self.num_suppressed = 0  # lines that were not shown because they result from another rank's failure
        self._held: list[bytes] = []
        self._held_until: float | None = None  # None while no line is held
        self._is_suppressed = self._is_released = False
        self._rest = b""
        self._shown_state = b""  # the state shown of the unfinished line, if any
        self._shown_at = 0.0

    def accept(self, data: bytes, now: float) -> None:
        """Show the lines that are complete with this data. Empty data means that the stream has ended."""
        if self.raw and data:
            self._console.put(self._descriptor, data, self.raw)
        if self.raw or self._is_hidden:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES and b"\r" in self._rest:
            self._rest = b"\r" + last_state(self._rest)
        if len(self._rest) > MAX_LINE_BYTES or (self._rest and not data):
            lines, self._rest = [*lines, self._rest], b""
        self._show(self._hold_crash([shown for line in lines for shown in visible_lines(line)], now))
        self.tick(now)

    def _hold_crash(self, lines: list[bytes], now: float) -> list[bytes]:
        """Hold the lines from the first line of a crash on. Return the lines before it."""
        if self._is_suppressed:
            self.num_suppressed += len(lines)
            return []
        if self._held_until is not None:
            self._held += lines
            return []
        crash = (number for number, line in enumerate(lines) if CRASH_START.match(line))
        first = len(lines) if self._is_released else next(crash, len(lines))
        self._held = lines[first:]
        self._held_until = now + HOLD_S if self._held else None
        return lines[:first]

    def tick(self, now: float) -> None:
        """Show the lines that have been held long enough, and the last state of the progress bar."""
        if self._held_until is not None and (now > self._held_until or len(self._held) > MAX_HELD_LINES):
            self._show_held()
        if self._has_state and now >= self._shown_at + PROGRESS_S:
            self._put(last_state(self._rest), b"", now)

    @property
    def needs_tick(self) -> bool:
        """Whether ``tick`` must be called although no new data arrives: there are held lines, or a progress bar."""
        return self._held_until is not None or self._has_state

    def suppress(self) -> None:
        """Drop the held lines, and show no lines from now on."""
        self.num_suppressed += len(self._held)
        self._held, self._held_until, self._is_suppressed = [], None, True

    def release(self) -> None:
        """Show the held lines, and hold back no lines from now on. Suppressed lines stay suppressed."""
        self._is_released = True
        self._show_held()

    def _show_held(self) -> None:
        held, self._held, self._held_until = self._held, [], None
        self._show(held)

    @property
    def _has_state(self) -> bool:
        is_shown = not self._is_suppressed and self._held_until is None
        return b"\r" in self._rest and is_shown and last_state(self._rest) not in (b"", self._shown_state)

    def _show(self, lines: list[bytes]) -> None:
        for line in lines:
            self._put(strip_torch_prefix(line, self._rank), b"\n", 0.0)

    def _put(self, text: bytes, end: bytes, now: float) -> None:
        """Show a line. If ``end`` is empty, ``text`` is a new state of a progress bar, and replaces the last state."""
        before = self._shown_state
        padding = b" " * (len(before.decode(errors="replace")) - len(text.decode(errors="replace")))
        start = b"\r" if before or not end else b""
        self._console.put(self._descriptor, start + self._prefix + text + padding + end, self)
        self._shown_state, self._shown_at = (b"", self._shown_at) if end else (text, now)


def visible_lines(line: bytes) -> list[bytes]:
    """Return the last state of ``line``, which is the text after its last carriage return.

    If this text is a progress bar followed by a traceback's header, return the bar and the header as two lines.
    """
    state = last_state(line)
    if b"\r" in line and state.endswith(TRACEBACK) and state != TRACEBACK:
        return [state.removesuffix(TRACEBACK), TRACEBACK]
    return [state]
