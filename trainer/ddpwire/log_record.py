"""JSON objects in a log that is read on another machine. They are compressed with zlib and split into several lines.

``[node1] ddprun-record 2/3 BASE64`` is part of a node's events, history and environment (file names and contents). A
node writes such a record if only its log is kept after the node has ended.

``[node0 rank0] ddpcheck-record 1/1 BASE64`` is the result of a check.
"""

import base64
import contextlib
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddpwire.events import EVENTS, EVENTS_BEFORE
from ddpwire.history import HISTORY
from ddpwire.run_files import ENVIRONMENT, NODE_LOG, OUTCOME, read_regular, write_atomic

FILES = (HISTORY, EVENTS_BEFORE, EVENTS, ENVIRONMENT, OUTCOME)
_WHOLE = (ENVIRONMENT, OUTCOME, NODE_LOG)  # files that a newer text replaces
# Events that recur while ranks train. They are left out first: the others tell the phases of a run.
_RECURRING = re.compile(r'"event": "(?:checkpoint_saved|epoch_ended|straggler|straggler_gone)"')
_PART = r"([0-9]{1,5})/([0-9]{1,5}) ([A-Za-z0-9+/=]+)$"
LINE = re.compile(rf"^\[node([0-9]{{1,4}})\] ddprun-record {_PART}", re.MULTILINE)
RESULT_LINE = re.compile(rf"^(\[node[0-9]{{1,4}} rank0\] )?ddpcheck-record {_PART}", re.MULTILINE)
LINE_BYTES = 1000
LEAST_LINES, MOST_LINES = 3, 120  # the fewest hold the phases of a short run
MOST_TEXT = 20_000_000  # bytes of a record after decompression


def pack(node_dir: Path, seconds: float) -> tuple[str, ...]:
    """Return the lines of a node's record, without a prefix such as ``[node1] ``.

    There is at most one line per minute of the ``seconds`` for which the node has run, but LEAST_LINES in any case. So
    old events and some rows of the history may be left out.
    """
    most = min(max(math.ceil(seconds / 60), LEAST_LINES), MOST_LINES)
    texts = {name: text for name in FILES if (text := _read(node_dir / name))}
    while len(lines := _encode("ddprun-record", texts)) > most:
        texts = {name: half for name, text in texts.items() if (half := _half(name, text, most, texts))}
    return lines if texts else ()


def pack_result(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the lines with the result of a check. Rank 0 prints these lines."""
    return _encode("ddpcheck-record", result)


def _encode(kind: str, value: Mapping[str, Any]) -> tuple[str, ...]:
    data = base64.b64encode(zlib.compress(json.dumps(value).encode(), 9)).decode()
    parts = [data[at : at + LINE_BYTES] for at in range(0, len(data), LINE_BYTES)]
    return tuple(f"{kind} {number}/{len(parts)} {part}" for number, part in enumerate(parts, 1))


def _half(name: str, text: str, most: int, texts: Mapping[str, str]) -> str:
    if name == HISTORY:
        head, *rows = text.splitlines(keepends=True)
        return "".join((head, *rows[-1::-2][::-1])) if len(rows) > 1 else ""
    if name in _WHOLE:  # one JSON object, of which a half is of no use
        return text if len(text) < most * LINE_BYTES // 2 else ""
    lines = text.splitlines(keepends=True)
    old = [at for at, line in enumerate(lines) if _RECURRING.search(line)]
    if not old and HISTORY not in texts:  # before that, the history can still become shorter
        old = list(range(len(lines)))
    left_out = set(old[: (len(old) + 1) // 2])
    return "".join(line for at, line in enumerate(lines) if at not in left_out)


def unpack(log: str) -> dict[str, str]:
    """Return the files in the last complete record of a node's log, or an empty dict if no record can be read."""
    files: dict[str, str] = {}
    for record in _records(LINE, log):
        files = {name: text for name, text in record.items() if name in FILES and isinstance(text, str)} or files
    return files


def unpack_result(log: str) -> dict[str, Any] | None:
    """Return the last complete result of a check, or None if none can be read."""
    return next(reversed([*_records(RESULT_LINE, log)]), None)


def _records(line: re.Pattern[str], log: str) -> Iterator[dict[str, Any]]:
    parts: list[str] = []
    for _, number, count, part in line.findall(log):
        parts = [*parts, part] if int(number) == len(parts) + 1 else [part] if number == "1" else []
        if len(parts) == int(count) and isinstance(record := _decode("".join(parts)), dict):
            yield record


def without(log: str) -> str:
    """Return the log without the lines of the nodes' records, which are not meant for people."""
    return "".join(line for line in log.splitlines(keepends=True) if not LINE.match(line))


def _decode(data: str) -> Any:
    with contextlib.suppress(ValueError, TypeError, RecursionError, zlib.error):
        return json.loads(zlib.decompressobj().decompress(base64.b64decode(data), MOST_TEXT))
    return None


def keep(node_dir: Path, texts: Mapping[str, str]) -> None:
    """Add the lines of ``texts`` to a node's files. The events and the history of an earlier pod remain."""
    node_dir.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        if name not in _WHOLE:
            text = "".join(dict.fromkeys((_read(node_dir / name) + text).splitlines(keepends=True)))
        write_atomic(node_dir / name, text.encode())


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return read_regular(path).decode(errors="replace")
    return ""
