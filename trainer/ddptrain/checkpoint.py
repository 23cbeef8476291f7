"""The format of a checkpoint: what is in it, how its two files are written and read.

    step-00000008.pt       what torch.save writes of a Checkpoint; loading it never runs code: weights_only, always
    step-00000008.json     its manifest: size and SHA-256 of the file, its step and its configuration
    step-00000008.shard-1  of a sharded training: what the second rank writes; the first writes step-00000008.pt

In a shard a tensor is a dictionary of "rows", those of its rank, and "shape", that of the whole tensor. The shards'
rows one after the other are the tensor.

The checkpoint exists once its manifest does. The data is written as ``.step-00000008.pt.part`` and synced to disk,
the manifest is renamed to its name, then the data is. Where a manifest and a matching part are found, a kill came
between the two, and ``finish_write`` renames the part. So are the shards, all before the manifest is written.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from ddpwire.run_files import read_regular, sync_folder

FORMAT = 2  # of one file; format 1 had no manifest
SHARDED_FORMAT = 3  # of several files
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
class Rows:
    """A tensor in shards, which may be mapped files."""

    shards: Sequence[Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What one rank writes of a checkpoint.

    ``gather`` returns to the writer of shard 0 what each writer passes to it, and None to the others.
    """

    number: int
    gather: Callable[[Any], list[Any] | None]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a checkpoint, in a file beside it."""

    format: int
    step: int
    bytes: int
    sha256: str
    config_sha256: str  # of Checkpoint.shaping
    accuracy: float | None
    shards: Sequence[Sequence[Any]] = ()  # size and SHA-256 of each file after the first

    def text(self) -> str:
        """The text of the file, the only valid one: any other byte means corruption."""
        values = asdict(self)
        if self.format == FORMAT:
            del values["shards"]
        return json.dumps(values, indent=1) + "\n"

    def files(self, path: Path) -> list[tuple[Path, int, str]]:
        """Return each file of the data, with its size and its SHA-256."""
        described = [(self.bytes, self.sha256), *self.shards]
        return [(shard_path(path, number), size, digest) for number, (size, digest) in enumerate(described)]


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
        what = "a newer ddptrain wrote it" if number > SHARDED_FORMAT else "an older ddptrain wrote it"
        known = f"formats {FORMAT} and {SHARDED_FORMAT}"
        super().__init__("incompatible", f"it has format {number} ({what}), this ddptrain reads {known}")
        self.number = number


def manifest_path(path: Path) -> Path:
    """Return the path of a checkpoint's manifest."""
    return path.with_suffix(".json")


def shard_path(path: Path, number: int) -> Path:
    """Return the path of a shard of a checkpoint; the first has the checkpoint's own."""
    return path.with_suffix(f".shard-{number}") if number else path


def first_file(path: Path) -> Path:
    """Return the path of a checkpoint, by which the others are found, from that of any of its files."""
    return path.with_suffix(".pt") if re.fullmatch(r"\.json|\.shard-\d+", path.suffix) else path


def data_files(path: Path) -> list[Path]:
    """Return the files of a checkpoint's data that are there. Raises OSError."""
    return [file for file in (path, *sorted(path.parent.glob(f"{path.stem}.shard-*[0-9]"))) if file.exists()]


def map_tensors(tree: Any, function: Callable[[tuple[Any, ...], Any], Any], path: tuple[Any, ...] = ()) -> Any:
    """Return a nested state with each tensor replaced by what ``function`` returns for its path and itself."""
    if isinstance(tree, (Tensor, Rows)):
        return function(path, tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(item, function, (*path, key)) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = enumerate(tree)
        return type(tree)(map_tensors(item, function, (*path, index)) for index, item in items)
    return tree


def whole(state: Any) -> Any:
    """Return a nested state with its sharded tensors joined."""

    def join(_path: tuple[Any, ...], leaf: Any) -> Tensor:
        return torch.cat(list(leaf.shards)).view(leaf.shape) if isinstance(leaf, Rows) else leaf

    return map_tensors(state, join)


def partial_path(path: Path) -> Path:
    """Return the path of a file while it is written."""
    return path.with_name(f".{path.name}.part")


def config_sha256(shaping: Mapping[str, Any]) -> str:
    """Return the hash of the options that shape the weights."""
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()


def write_checkpoint(
    path: Path, checkpoint: Checkpoint, *, on_write: Callable[[], None] = lambda: None, shard: Shard | None = None
) -> int:
    """Write both files, and return the size in bytes. Raise OSError, and then leave the folder as it was.

    ``on_write`` is called whenever a piece has reached the disk. With a ``shard``, each writer calls this
    function and writes its file; the first one writes the manifest, of all of them, or none if one of them fails.
    """
    number = FORMAT if shard is None else SHARDED_FORMAT
    part = partial_path(path if shard is None else shard_path(path, shard.number))
    try:
        written = _write_data(part, checkpoint, number, on_write)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if shard is not None:
            code = error.errno if isinstance(error, OSError) else None
            reason = error.strerror if isinstance(error, OSError) else error
            shard.gather(OSError(code or errno.EIO, f"{reason} (shard {shard.number})"))
        raise
    files = [written] if shard is None else shard.gather(written)
    if files is None:
        return written[0]
    parts = [partial_path(shard_path(path, index)) for index in range(len(files))]
    try:
        if failed := next((one for one in files if isinstance(one, OSError)), None):
            raise failed
        manifest = Manifest(
            format=number,
            step=checkpoint.step,
            bytes=files[0][0],
            sha256=files[0][1],
            config_sha256=config_sha256(checkpoint.shaping),
            accuracy=checkpoint.accuracy,
            shards=files[1:],
        )
        name = manifest_path(path)
        with create_file(partial_path(name)) as text:
            text.write(manifest.text().encode())
            text.flush()
            os.fsync(text.fileno())
        partial_path(name).replace(name)
        sync_folder(path.parent)
    except BaseException:
        for unfinished in (*parts, partial_path(manifest_path(path))):
            unfinished.unlink(missing_ok=True)
        raise
    for index, part in enumerate(parts):
        part.replace(shard_path(path, index))
    sync_folder(path.parent)
    return sum(size for size, _ in files)


def _write_data(part: Path, checkpoint: Checkpoint, number: int, on_write: Callable[[], None]) -> tuple[int, str]:
    """Write a file of data, and return its size and SHA-256. Raises OSError."""
    with create_file(part) as file:
        hashed = _HashingFile(file, on_write)
        try:
            torch.save({"format": number, **vars(checkpoint)}, cast(IO[bytes], hashed))
        except Exception as error:
            raise hashed.failure or error from None  # torch replaces the disk's error by one of its own
        hashed.sync()
    return hashed.size, hashed.digest.hexdigest()


def create_file(path: Path) -> BinaryIO:
    """Open a new file, never one that a link leads to. Raises OSError."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def finish_write(path: Path) -> None:
    """Complete a write that a kill has interrupted, or remove what is left of it. Raises OSError."""
    parts = list(path.parent.glob(f".{path.stem}.*.part"))
    try:
        for file, size, digest in read_manifest(path).files(path):
            if partial_path(file) in parts:
                _check_file(partial_path(file), size, digest)
                partial_path(file).replace(file)
    except (OtherFormat, OSError):
        return  # for the version that wrote it, or for a time when it can be read
    except CorruptCheckpoint:
        for part in parts:
            part.unlink(missing_ok=True)
    else:
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
        is_newer = type(number) is int and number > SHARDED_FORMAT
        if is_newer and not _describes(values, path):
            raise OtherFormat(number)
        manifest = Manifest(**values)
        sizes, digests = zip(*((size, digest) for _, size, digest in manifest.files(path)), strict=True)
        numbers, texts = (manifest.step, *sizes), (*digests, manifest.config_sha256)
        whole = text == manifest.text() and all(type(number) is int for number in numbers)
        whole = whole and all(isinstance(one, str) for one in texts)
        whole = whole and isinstance(manifest.accuracy, float | int | None)
        whole = whole and type(manifest.format) is int and manifest.format in (FORMAT, SHARDED_FORMAT)
    except FileNotFoundError:
        raise CorruptCheckpoint("missing", f"its manifest {file.name} is missing") from None
    except (ValueError, TypeError, LookupError, RecursionError):
        whole = False
    if not whole:
        raise CorruptCheckpoint("corrupt", f"its manifest {file.name} is corrupt")
    return manifest


def _describes(values: Mapping[str, Any], path: Path) -> bool:
    """Return whether all that a manifest says but its format fits the data, which has the format of this version."""
    for file in (path, partial_path(path)):
        with contextlib.suppress(UnusableCheckpoint, OSError, TypeError):
            manifest = Manifest(**values)
            _parse(io.BytesIO(_read_checked(file, manifest)), SHARDED_FORMAT if manifest.shards else FORMAT)
            return True
    return False


def load_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint, verified by its manifest. Raises UnusableCheckpoint and OSError."""
    manifest = read_manifest(path)
    try:
        if manifest.format == SHARDED_FORMAT:
            checkpoint = _map_shards(path, manifest)
        else:
            checkpoint = parse_checkpoint(_read_checked(path, manifest))
    except FileNotFoundError:
        raise CorruptCheckpoint("missing", f"it is missing, {manifest_path(path).name} is there") from None
    actual = (checkpoint.step, config_sha256(checkpoint.shaping), checkpoint.accuracy)
    if actual != (manifest.step, manifest.config_sha256, manifest.accuracy):
        raise CorruptCheckpoint("corrupt", f"its manifest {manifest_path(path).name} is another one's")
    return checkpoint


def parse_checkpoint(data: bytes) -> Checkpoint:
    """Return a checkpoint of one file from its bytes. Raises UnusableCheckpoint."""
    if not data.startswith(ZIP):
        raise CorruptCheckpoint("corrupt", "corrupt, or not a checkpoint")
    return _parse(io.BytesIO(data), FORMAT)


def _map_shards(path: Path, manifest: Manifest) -> Checkpoint:
    """Return a checkpoint of several files, which are mapped into memory. Raises CorruptCheckpoint and OSError."""
    files = manifest.files(path)
    for file, size, digest in files:
        _check_file(file, size, digest)
    shards = [_parse(file, SHARDED_FORMAT) for file, _, _ in files]
    first = shards[0]
    try:
        return replace(first, parts=_join_rows(first.parts, [shard.parts for shard in shards]))
    except (LookupError, TypeError, RuntimeError) as error:
        raise CorruptCheckpoint("corrupt", "its shards are not of one checkpoint") from error


def _join_rows(first: Any, all_shards: Sequence[Any]) -> Any:
    """Return the state of the first shard, with the rows of all of them."""
    if isinstance(first, Mapping) and first.keys() == {"rows", "shape"}:
        rows, shape = [shard["rows"] for shard in all_shards], tuple(first["shape"])
        return Rows(shards=rows, shape=shape, dtype=rows[0].dtype)
    if isinstance(first, Mapping):
        return {key: _join_rows(item, [shard[key] for shard in all_shards]) for key, item in first.items()}
    return first


def _parse(file: io.BytesIO | Path, expected: int) -> Checkpoint:
    """Return what torch.load reads of a file, which is mapped into memory, or of bytes. Raises UnusableCheckpoint."""
    try:
        values = torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, Path))
        number = int(values.pop("format"))
        if number == SHARDED_FORMAT != expected:
            raise CorruptCheckpoint("missing", "it is one shard of several, and there is no manifest of format 3")
        if number != expected:
            raise OtherFormat(number)
        return Checkpoint(**values)
    except (UnusableCheckpoint, MemoryError):
        raise
    except Exception as error:  # a broken pickle can fail in any way
        raise CorruptCheckpoint("corrupt", "corrupt, or not a checkpoint") from error


def _read_checked(path: Path, manifest: Manifest) -> bytes:
    """Return the bytes of a file that matches its manifest. Raises CorruptCheckpoint and OSError."""
    data = read_regular(path)
    if len(data) != manifest.bytes:
        raise CorruptCheckpoint("truncated", f"it has {len(data):,} bytes, not {manifest.bytes:,}")
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise CorruptCheckpoint("corrupt", f"its SHA-256 is not that of {manifest_path(path).name}")
    return data


def _check_file(file: Path, size: int, digest: str) -> None:
    """Raise CorruptCheckpoint if a file is not as described, and OSError when it cannot be read."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"{file.name} is not a regular file")
    if found.st_size != size:
        raise CorruptCheckpoint("truncated", f"{file.name} has {found.st_size:,} bytes, not {size:,}")
    with file.open("rb") as data:
        if hashlib.file_digest(data, "sha256").hexdigest() != digest:
            raise CorruptCheckpoint("corrupt", f"the SHA-256 of {file.name} is not that of its manifest")


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
