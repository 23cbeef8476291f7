"""Formats text for a terminal: error messages, suggestions, durations, tables."""

import difflib
import math
import re
from collections.abc import Collection, Sequence

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def quote(value: object) -> str:
    """Return a value for an error message, on one line with at most 60 characters. Text is in quotes."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]}...{text[-1]}"


def one_line(text: str) -> str:
    """Return the text with all unprintable characters escaped, including line breaks."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def plain(text: str) -> str:
    """Return lines without control characters.

    Colors and overwritten text are removed, tabs become spaces, and all other control characters are escaped.
    """
    lines = (_COLOUR.sub("", line).rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return "\n".join(one_line(line.expandtabs(4)) for line in lines)


_ESCAPES = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]"  # a control sequence, ECMA-48
    rb"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"  # a title, a clipboard's content
    rb"|\x1b[ -/]*[0-~]?|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]"
)
_UNFINISHED = re.compile(rb"(?:\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]{0,4096}|[ -/]*)|\xc2)\Z")


class EscapeFilter:
    """Removes escape sequences and control characters, except tabs and line breaks, from a stream of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def __call__(self, data: bytes) -> bytes:
        """Return the filtered bytes. An incomplete escape sequence is kept until the next call."""
        data, self._rest = self._rest + data, b""
        if unfinished := _UNFINISHED.search(data):
            data, self._rest = data[: unfinished.start()], unfinished[0]
        return _ESCAPES.sub(b"", data)


def cut(line: str, width: int, *, plain: bool = False) -> str:
    """Shorten a line to ``width`` columns with an ellipsis at its end, or with three dots if ``plain``."""
    dots = "..." if plain else "…"
    return line if len(line) <= width else line[: max(0, width - len(dots))].rstrip() + dots


def either(names: tuple[str, ...], joint: str = "or") -> str:
    """Return the names as text, such as ``a, b or c``."""
    return f" {joint} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def some(names: Sequence[str], most: int) -> str:
    """Return the first names, and the number of the others: ``a, b and 3 more``."""
    others = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(one_line, names[:most])) + others


def unknown(name: str, noun: str, known: Collection[str], meant: str | None = None) -> str:
    """Return an error message, such as ``'nodse' is not a key of a job; did you mean 'nodes'?``.

    ``meant`` is the name to suggest. If it is None, the most similar known name is suggested.
    """
    # Only the first characters are compared, in lower case: the name may be the text of a complete file.
    word = name[:60].lower()
    near = [meant] if meant else [key for key in known if len(word) > 2 and key.startswith(word)]
    near = near or difflib.get_close_matches(word, known, n=1)
    alternatives = f"known: {', '.join(known)}" if known else "none is defined"
    return f"{quote(name)} is not a {noun}; " + (f"did you mean {quote(near[0])}?" if near else alternatives)


def counted(number: int | str, noun: str) -> str:
    """Return a number with its noun: ``1 node``, ``2 nodes``, ``1:4 nodes``."""
    return f"{number} {noun}" if str(number) == "1" else f"{number} {noun}s"


def format_duration(seconds: float) -> str:
    """Return a duration as text: 0.4 s, 12 s, 3:05 or 2:04:11."""
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the rows as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]


def number(value: float) -> str:
    """Return a number with four decimals, or in scientific notation if it is very small or large."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.3e}"
