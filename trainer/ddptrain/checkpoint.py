"""Checkpoints: what is in one, how it is written, which ones a folder holds. Rank 0 alone comes here.

Loading never runs code from a file: weights_only, always.
"""

import errno
import io
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddptrain.errors import TrainError
from ddptrain.metrics import Metrics
from ddpwire.exits import Exit
from ddpwire.folder import write_atomic

FORMAT = 1  # for a later version, that may write them otherwise
ZIP = b"PK\x03\x04"  # what torch.save writes is a zip; what is none, torch.load would try as an older format
_NAME = re.compile(r"step-(\d{8,})\.pt")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A training after ``step`` optimizer steps. The data stream has no other state."""

    step: int
    shaping: Mapping[str, Any]  # the options that it must be gone on with
    model: dict[str, Any]
    optimizer: dict[str, Any]
    ema: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None


class Corrupt(Exception):  # noqa: N818 - a fact about a file, not ours to report
    """A file that is no whole checkpoint."""


class Saver:
    """Writes checkpoints into a folder and keeps the newest ones."""

    def __init__(self, folder: Path, *, keep: int, metrics: Metrics) -> None:
        self._folder = folder
        self._keep = keep
        self._metrics = metrics
        self.newest: Path | None = None  # the last one that was written, or read, whole

    def path(self, step: int) -> Path:
        """The file of a step."""
        return self._folder / f"step-{step:08d}.pt"

    def save(self, checkpoint: Checkpoint) -> None:
        """Write it. A failure is told and counted, and training may go on: the one before it is whole."""
        start = time.monotonic()
        path = self.path(checkpoint.step)
        buffer = io.BytesIO()
        torch.save({"format": FORMAT, **vars(checkpoint)}, buffer)
        try:
            write_atomic(path, buffer.getvalue())
        except OSError as error:
            self._metrics.checkpoint_failed(op="save", reason="enospc" if error.errno == errno.ENOSPC else "io")
            print(
                f"ddptrain: warning: no checkpoint of step {checkpoint.step}: {path}: {error.strerror}", file=sys.stderr
            )
            return
        self.newest = path
        self._metrics.saved(step=checkpoint.step, seconds=time.monotonic() - start, size_bytes=buffer.tell())
        for old in list_checkpoints(self._folder)[self._keep :] if self._keep else ():
            old.unlink(missing_ok=True)


def open_folder(folder: Path) -> None:
    """Make the folder, prove that it can be written, and sweep up what a killed run left half written.

    Raises TrainError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob(".step-*.pt.*"):
            torn.unlink(missing_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        try:
            probe.write_bytes(b"\0" * 4096)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        reason = (
            "there is a file in its place"
            if isinstance(error, (FileExistsError, NotADirectoryError))
            else error.strerror
        )
        raise TrainError(
            Exit.CANNOT_WRITE, f"--checkpoint-dir {folder} cannot be written: {reason}; give another one"
        ) from None


def list_checkpoints(folder: Path) -> list[Path]:
    """Those of a folder, the newest first."""
    numbered = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def load(path: Path) -> Checkpoint:
    """What is in a file. Raises Corrupt, and OSError when it cannot be read."""
    data = path.read_bytes()
    if not data.startswith(ZIP):
        raise Corrupt("torn or not a checkpoint")
    try:
        values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        values.pop("format")
        return Checkpoint(**values)
    except Exception as error:  # a broken pickle can fail in any way
        raise Corrupt("torn or not a checkpoint") from error
