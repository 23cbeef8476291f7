"""Views, which show the output of ranks on ddprun's console.

``View`` shows nothing. ``RawView`` shows the bytes of one rank immediately. ``LineView`` shows complete lines, prefixed
with their rank, and updates progress bars once a second. It holds back the lines of a crash (``LogFilter``).
"""

import re

from ddprun.output.console import Console
from ddprun.output.timed_log import MAX_LINE_BYTES, strip_torch_prefix
from ddpwire.merged_output import last_state

PROGRESS_S = 1.0  # between two states of a progress bar
HELD_POLL_S = 0.5  # how often held lines are checked
HOLD_S = 8.0  # a rank may exit 2 s after its traceback, the decision may take 2 s more, and machines are busy
MAX_HELD_LINES = 2000  # a rank that prints more than this is not crashing
CRASH_START = re.compile(
    rb"(\[rank\d+\]: ?)*((  \+ Exception Group )?Traceback \(most recent call last\):|terminate called )"
    rb"|\[rank\d+\]:\[E"
)
TRACEBACK = b"Traceback (most recent call last):"


class View:
    """A view that shows nothing. It is the base class of the other views."""

    num_suppressed = 0  # lines that were not shown because they result from another rank's failure

    def accept(self, data: bytes, now: float) -> None:
        """Process data that the rank has written. Empty data means that the stream has ended."""

    def tick(self, now: float) -> None:
        """Show the lines that have been held long enough at the time ``now``."""

    def due(self, now: float) -> float | None:
        """Return the seconds until ``tick`` must be called, or None if no call is needed before new data arrives."""

    def suppress(self) -> None:
        """Show nothing from now on, because all further output is a consequence of another rank's failure."""

    def release(self) -> None:
        """Show the held lines, and hold back no lines from now on."""


class RawView(View):
    """Shows each byte immediately.

    This is the view of a rank that is being debugged, or of the only rank that is shown.
    """

    def __init__(self, console: Console, descriptor: int, source: object) -> None:
        self._console = console
        self._descriptor = descriptor
        self._source = source

    def accept(self, data: bytes, now: float) -> None:  # noqa: ARG002
        """Show the data immediately."""
        if data:
            self._console.put(self._descriptor, data, self._source)


class LineView(View):
    """Shows complete lines, and the latest state of a progress bar, which overwrites its own line with ``\\r``."""

    def __init__(self, console: Console, descriptor: int, prefix: bytes, rank: int) -> None:
        self._console = console
        self._descriptor = descriptor
        self._prefix = prefix
        self._rank = rank
        self._filter = LogFilter()
        self._rest = b""
        self._shown_state = b""  # the state shown of the unfinished line, if any
        self._shown_at = 0.0

    @property
    def num_suppressed(self) -> int:  # type: ignore[override]
        """Return the number of lines that were not shown because another rank failed first."""
        return self._filter.num_suppressed

    def accept(self, data: bytes, now: float) -> None:
        """Add the data, and show the lines that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES and b"\r" in self._rest:
            self._rest = b"\r" + last_state(self._rest)
        if len(self._rest) > MAX_LINE_BYTES or (self._rest and not data):
            lines, self._rest = [*lines, self._rest], b""
        self._show(self._filter.accept([shown for line in lines for shown in visible_lines(line)], now))
        self.tick(now)

    def tick(self, now: float) -> None:
        """Show the lines that have been held long enough, and the last state of the progress bar."""
        self._show(self._filter.release_due(now))
        if self._has_state and now >= self._shown_at + PROGRESS_S:
            self._put(last_state(self._rest), b"", now)

    def due(self, now: float) -> float | None:
        """Return the seconds until held lines are checked or a progress bar is updated, or None if neither exists."""
        waits = [HELD_POLL_S] if self._filter.is_holding else []
        if self._has_state:
            waits.append(max(0.0, self._shown_at + PROGRESS_S - now))
        return min(waits, default=None)

    def suppress(self) -> None:
        """Show no lines from now on."""
        self._filter.suppress()

    def release(self) -> None:
        """Show the held lines, and hold back no lines from now on."""
        self._show(self._filter.release())

    @property
    def _has_state(self) -> bool:
        return b"\r" in self._rest and self._filter.is_open and last_state(self._rest) not in (b"", self._shown_state)

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


class LogFilter:
    """Holds back the lines of a crash until it is known which rank failed first. Pure.

    When one rank fails, the other ranks lose their connections, and each prints a traceback before ddprun knows of the
    first failure. These tracebacks would hide the cause. So a rank's lines are held from the first line of a crash on.
    As soon as the nodes agree on the rank that failed first, the lines of this rank are shown. The held lines of the
    other ranks remain only in their log files. If the nodes name no rank in time, or the run is stopped, all lines are
    shown.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._until: float | None = None  # None while nothing is held
        self._suppressed = self._released = False
        self.num_suppressed = 0

    def accept(self, lines: list[bytes], now: float) -> list[bytes]:
        """Add new lines, and return the lines that may be shown now."""
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
        """Return the held lines if they are too many or were held long enough. Otherwise return an empty list."""
        if self._until is not None and (now > self._until or len(self._held) > MAX_HELD_LINES):
            return self._release()
        return []

    def _release(self) -> list[bytes]:
        held, self._held, self._until = self._held, [], None
        return held

    def suppress(self) -> None:
        """Drop the held lines and all later lines, because they are a consequence of another rank's failure."""
        self.num_suppressed += len(self._release())
        self._suppressed = True

    def release(self) -> list[bytes]:
        """Return the held lines, and hold no lines from now on. Suppressed lines stay suppressed."""
        self._released = True
        return self._release()

    @property
    def is_open(self) -> bool:
        """Return whether a new line would be shown immediately."""
        return not self._suppressed and self._until is None

    @property
    def is_holding(self) -> bool:
        """Return whether lines are held."""
        return self._until is not None
