"""A rank's heartbeat: its last step, and when that step ended. The rank writes it, and ddprun reads it.

The heartbeat is a file of 24 bytes with three values:

* the last step (int64)
* the time at which that step ended (float64), on CLOCK_MONOTONIC, which all processes of a machine share
* why the ranks stop (int64): 1 + K if rank K received a signal, -1 if the training is complete, otherwise 0

The rank maps the file into its memory, so a write takes a microsecond, and the values remain after the rank has died.
The functions that read it take its path or the open file, which remains if it is deleted.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

HEARTBEAT_FILE: Final = "DDP_HEARTBEAT_FILE"  # set by ddprun for each rank
_RECORD = struct.Struct("<qdq")
_BEAT = struct.Struct("<qd")
_STOP = struct.Struct("<q")
_COMPLETE = -1


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank has recorded. A script need not record anything."""

    step: int | None = None  # its last step; None before its first heartbeat
    at_s: float = 0.0  # when that step ended (time.monotonic())
    stopped_for: int | None = None  # the rank whose signal made this rank stop
    is_complete: bool = False  # whether its training is complete


class Heart:
    """Writes the heartbeats of a rank. Without ddprun there is no file."""

    def __init__(self, path: str | None) -> None:
        self._map = mmap.mmap(-1, _RECORD.size)  # without ddprun, nothing else reads it
        if path:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(descriptor, _RECORD.size)
                if hasattr(os, "posix_fallocate"):  # a write to a sparse file on a full disk would kill the rank
                    os.posix_fallocate(descriptor, 0, _RECORD.size)
                self._map = mmap.mmap(descriptor, _RECORD.size)
            finally:
                os.close(descriptor)

    def beat(self, step: int) -> None:
        """Record that the training loop has reached the end of ``step``."""
        _BEAT.pack_into(self._map, 0, step, time.monotonic())

    def stopped_for(self, rank: int) -> None:
        """Record that the ranks have agreed to stop because ``rank`` received a signal."""
        _STOP.pack_into(self._map, _BEAT.size, 1 + rank)

    def complete(self) -> None:
        """Record that the last step was taken. If the ranks are stopped later, the training is still complete."""
        _STOP.pack_into(self._map, _BEAT.size, _COMPLETE)


def read_beat(source: Path | BinaryIO) -> Beat:
    """Return what a rank has recorded."""
    try:
        data = source.read_bytes() if isinstance(source, Path) else os.pread(source.fileno(), _RECORD.size, 0)
        step, at_s, stop = _RECORD.unpack(data)
    except (OSError, ValueError, struct.error):  # there is no record yet, or the file is closed
        return Beat()
    stopped_for = stop - 1 if stop > 0 else None
    return Beat(step=step if at_s else None, at_s=at_s, stopped_for=stopped_for, is_complete=stop == _COMPLETE)
