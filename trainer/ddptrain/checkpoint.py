"""The format of a checkpoint: what is in it, how its two files are written and read.

    step-00000008.pt     what torch.save writes of a Checkpoint; loading it never runs code: weights_only, always
    step-00000008.json   its manifest: size and SHA-256 of the file, its step and its configuration

The checkpoint exists once its manifest does. The data is written as ``.step-00000008.pt.part`` and synced to disk,
the manifest is renamed to its name, then the data is. Where a manifest and a matching part are found, a kill came
between the two, and ``finish_write`` renames the part.
"""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from ddpwire.run_files import read_regular, sync_folder

FORMAT = 2  # the only one that this version reads; format 1 had no manifest
ZIP = b"PK\x03\x04"  # torch.save writes a zip; torch.load would read anything else as an older format
SYNC_EVERY = 64 << 20  # bytes, so that a disk that hangs is noticed before all is written


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A training after ``step`` optimizer steps. The data stream has no other state."""

    step: int
    shaping: Mapping[str, Any]  # the options that a resumed training must share
    parts: Mapping[str, Any]  # state_dicts by name: model, optimizer, ...
    accuracy: float | None  # on the test images, 0 to 1; None: not measured at this step


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a checkpoint, in a file beside it."""

    format: int
    step: int
    bytes: int
    sha256: str
    config_sha256: str  # of Checkpoint.shaping
    accuracy: float | None

    def text(self) -> str:
        """The text of the file, the only valid one: any other byte means corruption."""
        return json.dumps(asdict(self), indent=1) + "\n"


class UnusableCheckpoint(Exception):  # noqa: N818 - the caller decides whether it is an error
    """A checkpoint that cannot be loaded. ``reason`` is the metric's: truncated, missing, corrupt or incompatible."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class CorruptCheckpoint(UnusableCheckpoint):
    """Files that are not a complete checkpoint."""


class OtherFormat(UnusableCheckpoint):
    """A checkpoint of another version of ddptrain. Nothing is wrong with it: it is neither renamed nor deleted."""

    def __init__(self, number: int) -> None:
        what = "a newer ddptrain wrote it" if number > FORMAT else "an older ddptrain wrote it"
        super().__init__("incompatible", f"it has format {number} ({what}), this ddptrain reads format {FORMAT}")
        self.number = number


def manifest_path(path: Path) -> Path:
    """Return the path of a checkpoint's manifest."""
    return path.with_suffix(".json")


def partial_path(path: Path) -> Path:
    """Return the path of a file while it is written."""
    return path.with_name(f".{path.name}.part")


def config_sha256(shaping: Mapping[str, Any]) -> str:
    """Return the hash of the options that shape the weights."""
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()


def write_checkpoint(path: Path, checkpoint: Checkpoint, *, on_write: Callable[[], None] = lambda: None) -> int:
    """Write both files, and return the size in bytes. Raise OSError, and then leave the folder as it was.

    ``on_write`` is called whenever a piece has reached the disk.
    """
    part = partial_path(path)
    try:
        with create_file(part) as file:
            hashed = _HashingFile(file, on_write)
            try:
                torch.save({"format": FORMAT, **vars(checkpoint)}, cast(IO[bytes], hashed))
            except Exception as error:
                raise hashed.failure or error from None  # torch replaces the disk's error by one of its own
            hashed.sync()
        manifest = Manifest(
            format=FORMAT,
            step=checkpoint.step,
            bytes=hashed.size,
            sha256=hashed.digest.hexdigest(),
            config_sha256=config_sha256(checkpoint.shaping),
            accuracy=checkpoint.accuracy,
        )
        name = manifest_path(path)
        with create_file(partial_path(name)) as text:
            text.write(manifest.text().encode())
            text.flush()
            os.fsync(text.fileno())
        partial_path(name).replace(name)
        sync_folder(path.parent)
    except BaseException:
        for unfinished in (part, partial_path(manifest_path(path))):
            unfinished.unlink(missing_ok=True)
        raise
    part.replace(path)
    sync_folder(path.parent)
    return hashed.size


def create_file(path: Path) -> BinaryIO:
    """Open a new file, never one that a link leads to. Raises OSError."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def finish_write(path: Path) -> None:
    """Complete a write that a kill has interrupted, or remove what is left of it. Raises OSError."""
    part = partial_path(path)
    try:
        _read_checked(part, read_manifest(path))
    except (OtherFormat, OSError):
        return  # for the version that wrote it, or for a time when it can be read
    except CorruptCheckpoint:
        part.unlink(missing_ok=True)
    else:
        part.replace(path)
        sync_folder(path.parent)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises UnusableCheckpoint, and OSError when it cannot be read.

    A newer format, where the data is of this one and as described, is a flipped bit.
    """
    file = manifest_path(path)
    try:
        text = read_regular(file).decode()
        values = json.loads(text)
        number = values["format"]
        is_newer = type(number) is int and number > FORMAT
        if is_newer and not _describes(values, path):
            raise OtherFormat(number)
        manifest = Manifest(**values)
        numbers, texts = (manifest.step, manifest.bytes), (manifest.sha256, manifest.config_sha256)
        whole = text == manifest.text() and all(type(number) is int for number in numbers)
        whole = whole and all(isinstance(one, str) for one in texts)
        whole = whole and isinstance(manifest.accuracy, float | int | None)
        whole = whole and type(manifest.format) is int and manifest.format == FORMAT
    except FileNotFoundError:
        raise CorruptCheckpoint("missing", f"its manifest {file.name} is missing") from None
    except (ValueError, TypeError, LookupError, RecursionError):
        whole = False
    if not whole:
        raise CorruptCheckpoint("corrupt", f"its manifest {file.name} is torn")
    return manifest


def _describes(values: Mapping[str, Any], path: Path) -> bool:
    """Return whether all that a manifest says but its format fits the data, which has the format of this version."""
    for file in (path, partial_path(path)):
        with contextlib.suppress(UnusableCheckpoint, OSError, TypeError):
            parse_checkpoint(_read_checked(file, Manifest(**values)))
            return True
    return False


def load_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint, verified by its manifest. Raises UnusableCheckpoint and OSError."""
    manifest = read_manifest(path)
    try:
        checkpoint = parse_checkpoint(_read_checked(path, manifest))
    except FileNotFoundError:
        raise CorruptCheckpoint("missing", f"it is missing, {manifest_path(path).name} is there") from None
    actual = (checkpoint.step, config_sha256(checkpoint.shaping), checkpoint.accuracy)
    if actual != (manifest.step, manifest.config_sha256, manifest.accuracy):
        raise CorruptCheckpoint("corrupt", f"its manifest {manifest_path(path).name} is another one's")
    return checkpoint


def parse_checkpoint(data: bytes) -> Checkpoint:
    """Return a checkpoint from its bytes. Raises UnusableCheckpoint."""
    if not data.startswith(ZIP):
        raise CorruptCheckpoint("corrupt", "torn or not a checkpoint")
    try:
        values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        number = int(values.pop("format"))
        if number != FORMAT:
            raise OtherFormat(number)
        return Checkpoint(**values)
    except (OtherFormat, MemoryError):
        raise
    except Exception as error:  # a broken pickle can fail in any way
        raise CorruptCheckpoint("corrupt", "torn or not a checkpoint") from error


def _read_checked(path: Path, manifest: Manifest) -> bytes:
    """Return the bytes of a file that matches its manifest. Raises CorruptCheckpoint and OSError."""
    data = read_regular(path)
    if len(data) != manifest.bytes:
        raise CorruptCheckpoint("truncated", f"it has {len(data):,} bytes, not {manifest.bytes:,}")
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise CorruptCheckpoint("corrupt", f"its SHA-256 is not that of {manifest_path(path).name}")
    return data


class _HashingFile:
    """A file that is hashed while it is written."""

    def __init__(self, file: BinaryIO, on_write: Callable[[], None]) -> None:
        self._file = file
        self._on_write = on_write
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
        self._on_write()

    def flush(self) -> None:
        """Do nothing; torch.save calls it."""
