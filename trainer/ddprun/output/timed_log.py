"""A log of lines ``TIME [node0 rank1] LINE``. TIME is the UTC time at which ddprun read the end of the line."""

import re
from datetime import UTC, datetime
from pathlib import Path

from ddprun.system.file_writer import FileWriter
from ddpwire.merged_output import last_state
from ddpwire.run_files import append_bounded

MAX_LINE_BYTES = 1 << 16  # the longest line that is kept together
MAX_BYTES = 1 << 25  # of a file; there are at most two


class TimedLog:
    """The log of one stream of a rank, or of ddprun itself (``rank`` is None)."""

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


def strip_torch_prefix(line: bytes, rank: int | None) -> bytes:
    """Remove torch's prefixes ``[rank3]: `` from the start of a line, because ddprun adds its own prefix."""
    return line if rank is None else re.sub(rb"^(\[rank%d\]: ?)+" % rank, b"", line)
