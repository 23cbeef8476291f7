"""The format of a checkpoint: its content, and how its files are written and read.

    step-00000008.pt       the data, written by torch.save; it is read with weights_only=True, which runs no code
    step-00000008.json     the manifest: size and SHA-256 of each data file, the step, the hash of the configuration
    step-00000008.shard-1  the data of the second rank, only in a sharded training

In the data of a sharded training, a sharded tensor is a dictionary. "rows" are the rows of the rank that wrote the
file, and "shape" is the shape of the complete tensor. The rows of all files, in order, are the complete tensor.

A checkpoint is complete once its manifest exists. All files are first written with names such as
``.step-00000008.pt.part`` and synced to disk. Then the manifest is renamed to its final name. The data files are
renamed last. If a process is killed between these renames, ``finish_write`` renames the ``.part`` files that match the
manifest.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from ddpwire.run_files import open_regular, read_regular, sync_folder

FORMAT = 2  # a checkpoint in one file; format 1 had no manifest
SHARDED_FORMAT = 3  # a checkpoint in several files
DataFile = tuple[Path, int, str]  # its path, size and SHA-256
SYNC_EVERY = 64 << 20  # bytes between two syncs, so that a disk that hangs is detected before the end of the file


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a training after ``step`` steps. The order of the samples follows from the seed and the step."""

    step: int
    shaping: Mapping[str, Any]  # the options that a resumed training must share
    parts: Mapping[str, Any]  # state_dicts by name: model, optimizer, ...
    accuracy: float | None  # on the test images, 0 to 1; None: not measured at this step


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A tensor that is split into shards by rows. A shard may be mapped into memory from a file."""

    shards: Sequence[Tensor]
    shape: tuple[int, ...]

    def copy_to(self, target: Tensor, first: int = 0) -> Tensor:
        """Fill ``target`` with the rows from ``first`` on, and return it. Only the shards with these rows are read."""
        start = -first  # of the shard, counted from the first row of the target
        for shard in self.shards:
            rows = shard[max(0, -start) : max(0, len(target) - start)]
            target[max(0, start) : max(0, start) + len(rows)].copy_(rows)
            start += len(shard)
        return target


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part that one rank writes. ``gather`` returns the values of all writers to that of shard 0, and else None."""

    number: int
    gather: Callable[[Any], list[Any] | None]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of a checkpoint: a JSON file beside the data."""

    format: int
    step: int
    bytes: int
    sha256: str
    config_sha256: str  # of Checkpoint.shaping
    accuracy: float | None
    shards: Sequence[Sequence[Any]] = ()  # size and SHA-256 of each file after the first

    def text(self) -> str:
        """Return the content of the manifest's file. A file with any other content is corrupt."""
        values = asdict(self)
        if self.format == FORMAT:
            del values["shards"]
        return json.dumps(values, indent=1) + "\n"

    def files(self, path: Path) -> list[DataFile]:
        """Return the data files."""
        described = [(self.bytes, self.sha256), *self.shards]
        return [(shard_path(path, number), size, digest) for number, (size, digest) in enumerate(described)]


class UnusableCheckpoint(Exception):  # noqa: N818 - the caller decides whether it is an error
    """Raised if a checkpoint cannot be loaded. One rank may send it to another, so it can be pickled.

    ``reason`` is one word for the label of a metric, such as "truncated" or "missing".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return self.message


class CorruptCheckpoint(UnusableCheckpoint):
    """Raised if the files are not a complete, intact checkpoint."""


class OtherFormat(UnusableCheckpoint):
    """Raised if another version of ddptrain wrote the checkpoint. Such a checkpoint is neither renamed nor deleted."""

    def __init__(self, number: int) -> None:
        writer = "a newer" if number > SHARDED_FORMAT else "an older"
        known = f"this ddptrain reads formats {FORMAT} and {SHARDED_FORMAT}"
        super().__init__("incompatible", f"it has format {number} ({writer} ddptrain wrote it), but {known}")


def manifest_path(path: Path) -> Path:
    """Return the path of a checkpoint's manifest."""
    return path.with_suffix(".json")


def shard_path(path: Path, number: int) -> Path:
    """Return the path of a checkpoint's data file with this number. Number 0 is the checkpoint's own path."""
    return path.with_suffix(f".shard-{number}") if number else path


def first_file(path: Path) -> Path:
    """Return the path of a checkpoint's first data file, given the path of any of its files."""
    return path.with_suffix(".pt") if re.fullmatch(r"\.json|\.shard-\d+", path.suffix) else path


def data_files(path: Path) -> list[Path]:
    """Return the paths of a checkpoint's existing data files. Raises OSError."""
    return [file for file in (path, *sorted(path.parent.glob(f"{path.stem}.shard-*[0-9]"))) if file.exists()]


def map_tensors(tree: Any, function: Callable[[tuple[Any, ...], Any], Any], path: tuple[Any, ...] = ()) -> Any:
    """Return a copy of a nested state, with ``function(path, tensor)`` in the place of each tensor."""
    if isinstance(tree, (Tensor, Rows)):
        return function(path, tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(item, function, (*path, key)) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = enumerate(tree)
        return type(tree)(map_tensors(item, function, (*path, index)) for index, item in items)
    return tree


def whole(state: Any) -> Any:
    """Return a copy of a nested state in which each tensor is complete, and not mapped from a file."""

    def join(_path: tuple[Any, ...], leaf: Tensor | Rows) -> Tensor:
        if isinstance(leaf, Rows):
            return leaf.copy_to(torch.empty(leaf.shape, dtype=leaf.shards[0].dtype))
        return leaf.clone()

    return map_tensors(state, join)


def partial_path(path: Path) -> Path:
    """Return the temporary path under which a file is written."""
    return path.with_name(f".{path.name}.part")


def config_sha256(shaping: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the options that affect the weights."""
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()


def write_checkpoint(
    path: Path, checkpoint: Checkpoint, *, on_write: Callable[[], None] = lambda: None, shard: Shard | None = None
) -> int:
    """Write the data and the manifest of a checkpoint. Return the number of bytes. Raises OSError.

    ``on_write`` is called after each sync to the disk. If writing fails before the manifest is on the disk, no new file
    is left. With a ``shard``, every writer calls this function and writes its own data file. The writer of shard 0 also
    writes the manifest. If any writer fails, the writer of shard 0 removes all new files.
    """
    format_number = FORMAT if shard is None else SHARDED_FORMAT
    part = partial_path(path if shard is None else shard_path(path, shard.number))
    written: Any  # the size and the SHA-256 of this writer's file, or its error
    try:
        written = _write_data(part, checkpoint, format_number, on_write)
    except Exception as error:  # the other writers wait for this one's result
        written = error
        if shard is not None:
            code, reason = getattr(error, "errno", None), getattr(error, "strerror", None)
            written = OSError(code or errno.EIO, f"{reason or error} (shard {shard.number})")
    files = [written] if shard is None else shard.gather(written)
    if files is None:
        if isinstance(written, Exception):
            raise written
        return int(written[0])
    parts = [partial_path(shard_path(path, index)) for index in range(len(files))]
    name = manifest_path(path)
    new_files = [partial_path(name), *parts]
    try:
        for outcome in files:
            if isinstance(outcome, Exception):
                raise outcome
        manifest = Manifest(
            format=format_number,
            step=checkpoint.step,
            bytes=files[0][0],
            sha256=files[0][1],
            config_sha256=config_sha256(checkpoint.shaping),
            accuracy=checkpoint.accuracy,
            shards=files[1:],
        )
        with create_file(partial_path(name)) as text:
            text.write(manifest.text().encode())
            text.flush()
            os.fsync(text.fileno())
        partial_path(name).replace(name)
        new_files.insert(0, name)
        sync_folder(path.parent)
    except BaseException:
        for unfinished in new_files:
            unfinished.unlink(missing_ok=True)
        raise
    for index, part in enumerate(parts):
        part.replace(shard_path(path, index))
    sync_folder(path.parent)
    return sum(size for size, _ in files)


def _write_data(part: Path, checkpoint: Checkpoint, number: int, on_write: Callable[[], None]) -> tuple[int, str]:
    with create_file(part) as file:
        hashed = _HashingFile(file, on_write)
        try:
            torch.save({"format": number, **vars(checkpoint)}, cast(IO[bytes], hashed))
        except Exception as error:
            raise hashed.failure or error from None  # torch replaces the disk's error with its own
        hashed.sync()
    return hashed.size, hashed.digest.hexdigest()


def create_file(path: Path) -> BinaryIO:
    """Create a file and open it for writing. Replaces a file or a symbolic link of this name. Raises OSError."""
    path.unlink(missing_ok=True)
    return path.open("xb")  # O_EXCL does not follow links


def finish_write(path: Path) -> None:
    """Complete a write that was interrupted when the process was killed, or remove its files. Raises OSError."""
    parts = list(path.parent.glob(f".{path.stem}.*.part"))
    try:
        for file, size, digest in read_manifest(path).files(path):
            if partial_path(file) in parts:
                check_files([(partial_path(file), size, digest)])
                partial_path(file).replace(file)
    except (OtherFormat, OSError):
        return  # keep the files for the version that wrote them, or until they can be read
    except CorruptCheckpoint:
        for part in parts:
            part.unlink(missing_ok=True)
    else:
        sync_folder(path.parent)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises UnusableCheckpoint. Raises OSError if the manifest cannot be read.

    The error is OtherFormat if the format number is too new for this version. There is one exception: if this version
    can read the data, and the rest of the manifest matches the data, only the number is wrong. Then the error is
    CorruptCheckpoint.
    """
    file = manifest_path(path)
    try:
        text = read_regular(file).decode()
        values = json.loads(text)
        number = values["format"]
        if type(number) is int and number > SHARDED_FORMAT and not _describes(values, path):
            raise OtherFormat(number)
        manifest = Manifest(**values)
        _, sizes, digests = zip(*manifest.files(path), strict=True)
        whole = (
            text == manifest.text()
            and all(type(value) is int for value in (number, manifest.step, *sizes))
            and all(isinstance(value, str) for value in (*digests, manifest.config_sha256))
            and isinstance(manifest.accuracy, float | int | None)
            and number in (FORMAT, SHARDED_FORMAT)
        )
    except FileNotFoundError:
        raise CorruptCheckpoint("missing", f"its manifest {file.name} is missing") from None
    except (ValueError, TypeError, LookupError, RecursionError):
        whole = False
    if not whole:
        raise CorruptCheckpoint("corrupt", f"its manifest {file.name} is corrupt")
    return manifest


def _describes(values: Mapping[str, Any], path: Path) -> bool:
    """Return whether the data matches the manifest ``values`` in everything except the format number."""
    for file in (path, partial_path(path)):
        with contextlib.suppress(UnusableCheckpoint, OSError, TypeError):
            manifest = Manifest(**values)
            check_files([(file, manifest.bytes, manifest.sha256)])
            _parse(file, SHARDED_FORMAT if manifest.shards else FORMAT)
            return True
    return False


def check_files(files: Sequence[DataFile]) -> None:
    """Verify the size and the SHA-256 of each file. Raises CorruptCheckpoint and OSError."""
    for file, size, digest in files:
        with open_regular(file) as data:
            actual = os.fstat(data.fileno()).st_size
            if actual != size:
                raise CorruptCheckpoint("truncated", f"{file.name} has {actual:,} bytes instead of {size:,}")
            if hashlib.file_digest(data, "sha256").hexdigest() != digest:
                raise CorruptCheckpoint("corrupt", f"the SHA-256 of {file.name} differs from the one in its manifest")


def load_checkpoint(path: Path, check: Callable[[Sequence[DataFile]], object] = check_files) -> Checkpoint:
    """Return a checkpoint after verifying its files with ``check``. Raises UnusableCheckpoint and OSError."""
    manifest = read_manifest(path)
    try:
        check(manifest.files(path))
        checkpoint = map_checkpoint(path, manifest)
    except FileNotFoundError:
        raise CorruptCheckpoint("missing", f"it is missing, but {manifest_path(path).name} exists") from None
    actual = (checkpoint.step, config_sha256(checkpoint.shaping), checkpoint.accuracy)
    if actual != (manifest.step, manifest.config_sha256, manifest.accuracy):
        raise CorruptCheckpoint("corrupt", f"its manifest {manifest_path(path).name} belongs to another checkpoint")
    return checkpoint


def map_checkpoint(path: Path, manifest: Manifest | None = None) -> Checkpoint:
    """Return a checkpoint whose files are verified. Its tensors are mapped into memory from the files.

    A file without a manifest is not sharded. Raises UnusableCheckpoint and OSError.
    """
    if manifest is None and not manifest_path(path).exists():
        open_regular(path).close()  # not a FIFO, for which torch would wait
        return _parse(path, FORMAT)
    manifest = manifest or read_manifest(path)
    shards = [_parse(file, manifest.format) for file, _, _ in manifest.files(path)]
    first = shards[0]
    try:
        return replace(first, parts=_join_rows(first.parts, [shard.parts for shard in shards]))
    except (LookupError, TypeError, RuntimeError) as error:
        raise CorruptCheckpoint("corrupt", "its shards belong to different checkpoints") from error


def _join_rows(first: Any, all_shards: Sequence[Any]) -> Any:
    if isinstance(first, Mapping) and first.keys() == {"rows", "shape"}:
        rows, shape = [shard["rows"] for shard in all_shards], tuple(first["shape"])
        return Rows(shards=rows, shape=shape)
    if isinstance(first, Mapping):
        return {key: _join_rows(item, [shard[key] for shard in all_shards]) for key, item in first.items()}
    return first


def _parse(file: Path, expected: int) -> Checkpoint:
    try:
        values = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        number = int(values.pop("format"))
        if number == SHARDED_FORMAT != expected:
            raise CorruptCheckpoint("missing", "it is one of several shards, but it has no manifest of format 3")
        if number != expected:
            raise OtherFormat(number)
        return Checkpoint(**values)
    except (UnusableCheckpoint, MemoryError):
        raise
    except Exception as error:  # a broken pickle can fail in any way
        raise CorruptCheckpoint("corrupt", "it is corrupt, or it is not a checkpoint") from error


class _HashingFile:
    """A file whose hash is computed while it is written."""

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
        """Do nothing. torch.save needs this method."""
