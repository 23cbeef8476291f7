"""One checkpoint: what is in it, how its two files are written and read. Knows nothing of other checkpoints.

    step-00000008.pt     what torch.save writes of a Checkpoint; loading it never runs code: weights_only, always
    step-00000008.json   its manifest: size and SHA-256 of the file, and what it is of; sha256sum can check it

The manifest is the moment of truth. The data is written as ``.step-00000008.pt.part`` and reaches the disk, the
manifest takes its name, then the data does. Whoever finds a manifest and a part that fits it finishes what a kill cut
short.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from ddpwire.folder import sync_folder

FORMAT = 2  # for a later version, that may write them otherwise
ZIP = b"PK\x03\x04"  # what torch.save writes is a zip; what is none, torch.load would try as an older format
SYNC_EVERY = 64 << 20  # bytes; a disk that hangs is then seen before all is written


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A training after ``step`` optimizer steps. The data stream has no other state."""

    step: int
    shaping: Mapping[str, Any]  # the options that it must be gone on with
    parts: Mapping[str, Any]  # state_dicts by name: model, optimizer, ...
    accuracy: float | None  # on the test images, 0 to 1; None: not measured at this step


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is said of a checkpoint beside it."""

    format: int
    step: int
    bytes: int
    sha256: str
    config_sha256: str  # of Checkpoint.shaping
    accuracy: float | None

    def text(self) -> str:
        """The one way to write it: another byte is a flipped one."""
        return json.dumps(asdict(self), indent=1) + "\n"


class Corrupt(Exception):  # noqa: N818 - a fact about a file, not ours to report
    """Files that are no whole checkpoint. ``reason`` is the metric's: truncated, missing or corrupt."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def manifest_of(path: Path) -> Path:
    """Where the manifest of a checkpoint is."""
    return path.with_suffix(".json")


def part_of(path: Path) -> Path:
    """Where a checkpoint is while it is written."""
    return path.with_name(f".{path.name}.part")


def config_sha256(shaping: Mapping[str, Any]) -> str:
    """The hash of the options that shape the weights."""
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()


def write(path: Path, checkpoint: Checkpoint, *, moved: Callable[[], None] = lambda: None) -> int:
    """Write both files; the size in bytes. Raises OSError, and then leaves what was there as it was.

    ``moved`` is called whenever the disk has taken a piece.
    """
    part = part_of(path)
    try:
        with part.open("wb") as file:
            hashed = _Hashed(file, moved)
            try:
                torch.save({"format": FORMAT, **vars(checkpoint)}, cast(IO[bytes], hashed))
            except Exception as error:
                raise hashed.failure or error from None  # torch makes an error of its own of the disk's
            hashed.sync()
        manifest = Manifest(
            format=FORMAT,
            step=checkpoint.step,
            bytes=hashed.size,
            sha256=hashed.digest.hexdigest(),
            config_sha256=config_sha256(checkpoint.shaping),
            accuracy=checkpoint.accuracy,
        )
        name = manifest_of(path)
        with part_of(name).open("w") as text:
            text.write(manifest.text())
            text.flush()
            os.fsync(text.fileno())
        part_of(name).replace(name)
        sync_folder(path.parent)
    except BaseException:
        for unfinished in (part, part_of(manifest_of(path))):
            unfinished.unlink(missing_ok=True)
        raise
    part.replace(path)
    sync_folder(path.parent)
    return hashed.size


def finish(path: Path) -> None:
    """Bring to its end, or away, a write that a kill has cut short. Raises OSError."""
    part = part_of(path)
    try:
        _check(part, read_manifest(path))
    except (Corrupt, OSError):
        part.unlink(missing_ok=True)
    else:
        part.replace(path)
        sync_folder(path.parent)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint. Raises Corrupt, and OSError when it cannot be read."""
    file = manifest_of(path)
    try:
        text = file.read_text()
        manifest = Manifest(**json.loads(text))
        numbers, texts = (manifest.step, manifest.bytes), (manifest.sha256, manifest.config_sha256)
        whole = text == manifest.text() and all(type(number) is int for number in numbers)
        whole = whole and all(isinstance(one, str) for one in texts)
        whole = whole and isinstance(manifest.accuracy, float | int | None)
    except FileNotFoundError:
        raise Corrupt("missing", f"its manifest {file.name} is missing") from None
    except (ValueError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise Corrupt("corrupt", f"its manifest {file.name} is torn")
    return manifest


def load(path: Path) -> Checkpoint:
    """The checkpoint, proved by its manifest. Raises Corrupt, and OSError when it cannot be read."""
    manifest = read_manifest(path)
    try:
        checkpoint = unpack(_check(path, manifest))
    except FileNotFoundError:
        raise Corrupt("missing", f"it is missing, {manifest_of(path).name} is there") from None
    told = (checkpoint.step, config_sha256(checkpoint.shaping), checkpoint.accuracy)
    if told != (manifest.step, manifest.config_sha256, manifest.accuracy):
        raise Corrupt("corrupt", f"its manifest {manifest_of(path).name} is another one's")
    return checkpoint


def unpack(data: bytes) -> Checkpoint:
    """A checkpoint from its bytes. Raises Corrupt."""
    if not data.startswith(ZIP):
        raise Corrupt("corrupt", "torn or not a checkpoint")
    try:
        values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        values.pop("format")
        return Checkpoint(**values)
    except Exception as error:  # a broken pickle can fail in any way
        raise Corrupt("corrupt", "torn or not a checkpoint") from error


def _check(path: Path, manifest: Manifest) -> bytes:
    """The bytes that the manifest promises."""
    data = path.read_bytes()
    if len(data) != manifest.bytes:
        raise Corrupt("truncated", f"it has {len(data):,} bytes, not {manifest.bytes:,}")
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise Corrupt("corrupt", f"its SHA-256 is not that of {manifest_of(path).name}")
    return data


class _Hashed:
    """A file that is hashed as it is written."""

    def __init__(self, file: BinaryIO, moved: Callable[[], None]) -> None:
        self._file = file
        self._moved = moved
        self._synced = 0
        self.digest = hashlib.sha256()
        self.failure: OSError | None = None
        self.size = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        try:
            self.size += self._file.write(data)
            if self.size - self._synced >= SYNC_EVERY:
                self.sync()
        except OSError as error:
            self.failure = error
            raise
        return len(data)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced = self.size
        self._moved()

    def flush(self) -> None:
        """torch.save calls it."""
