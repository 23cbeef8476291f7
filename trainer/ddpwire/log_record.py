"""A node's events, history and environment as lines of its log, for who reads them where nothing else is left of it.

``[node1] ddprun-record 2/3 BASE64``: the lines together are a JSON object, file → text, compressed with zlib.
"""

import base64
import contextlib
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

from ddpwire.events import EVENTS, EVENTS_BEFORE
from ddpwire.history import HISTORY
from ddpwire.run_files import ENVIRONMENT, read_regular, write_atomic

FILES = (HISTORY, EVENTS_BEFORE, EVENTS, ENVIRONMENT)
LINE = re.compile(r"^\[node([0-9]{1,4})\] ddprun-record ([0-9]{1,3})/([0-9]{1,3}) ([A-Za-z0-9+/=]+)$", re.MULTILINE)
LINE_BYTES = 4000  # a container's runtime splits a line of 16 KiB
MOST_BYTES = 120_000  # of all lines: 30 of them
MOST_TEXT = 20_000_000  # of what a record may hold


def pack(node_dir: Path) -> tuple[str, ...]:
    """The lines, without ``[node1] ``; of a long run the oldest events, and evenly the rows between, are left out."""
    texts = {name: text for name in FILES if (text := _read(node_dir / name))}
    while len(data := base64.b64encode(zlib.compress(json.dumps(texts).encode(), 9)).decode()) > MOST_BYTES:
        texts = {name: half for name, text in texts.items() if (half := _half(name, text))}
    parts = [data[at : at + LINE_BYTES] for at in range(0, len(data), LINE_BYTES)]
    return tuple(f"ddprun-record {number}/{len(parts)} {part}" for number, part in enumerate(parts, 1)) if texts else ()


def _half(name: str, text: str) -> str:
    if name == HISTORY:
        head, *rows = text.splitlines(keepends=True)
        return "".join((head, *rows[-1::-2][::-1])) if len(rows) > 1 else ""
    lines = text.splitlines(keepends=True)
    return "".join(lines[(len(lines) + 1) // 2 :])


def unpack(log: str) -> dict[str, str]:
    """The files of the last whole record of a node's log; none: there is none that can be read."""
    whole: dict[str, str] = {}
    parts: list[str] = []
    for _, number, count, part in LINE.findall(log):
        parts = [*parts, part] if int(number) == len(parts) + 1 else [part] if number == "1" else []
        if len(parts) == int(count):
            whole = _decode("".join(parts)) or whole
    return whole


def without(log: str) -> str:
    """The log as a person reads it."""
    return "".join(line for line in log.splitlines(keepends=True) if not LINE.match(line))


def _decode(data: str) -> dict[str, str]:
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError, zlib.error):
        text = zlib.decompressobj().decompress(base64.b64decode(data), MOST_TEXT)
        return {name: found for name, found in json.loads(text).items() if name in FILES and isinstance(found, str)}
    return {}


def keep(node_dir: Path, texts: Mapping[str, str]) -> None:
    """Add files to those that are kept of a node: of an earlier pod's events and history nothing is lost."""
    node_dir.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        lines = _read(node_dir / name).splitlines(keepends=True) if name != ENVIRONMENT else []
        write_atomic(node_dir / name, "".join(dict.fromkeys((*lines, *text.splitlines(keepends=True)))).encode())


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return read_regular(path).decode(errors="replace")
    return ""
