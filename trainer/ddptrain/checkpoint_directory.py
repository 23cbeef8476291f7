"""The checkpoint directory of a training: its lock, and which checkpoints are kept.

Only rank 0 locks the directory and deletes checkpoints.
"""

import contextlib
import errno
import os
import re
import secrets
import socket
import stat
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ddptrain.checkpoint import (
    Checkpoint,
    CorruptCheckpoint,
    DataFile,
    OtherFormat,
    UnusableCheckpoint,
    check_files,
    create_file,
    data_files,
    finish_write,
    load_checkpoint,
    manifest_path,
    read_manifest,
)
from ddptrain.distributed import RankInfo, agree, broadcast
from ddptrain.errors import TrainError, config_error, log_warning
from ddpwire import locks
from ddpwire.exits import Exit

T = TypeVar("T")
LOCK = ".lock"
LOCK_WAIT_S = 5.0  # a training that was stopped may need this long to exit
SUFFIX_BAD = ".bad"
READ_TRIES, READ_PAUSE_S = 3, 1.0
PASSING_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN)  # temporary errors of a network file system
_NAME = re.compile(r"step-(\d{8,})\.(?:pt|json)")


class CheckpointDirectory:
    """A checkpoint directory, locked until ``unlock`` or exit. Raises TrainError if another training has locked it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".probe-{os.getpid()}"
            try:
                with create_file(probe) as file:
                    file.write(b"\0" * 4096)
            finally:
                probe.unlink(missing_ok=True)
            self._lock()
            for pattern in (".step-*.json.*", ".shared-*"):
                for torn in folder.glob(pattern):
                    torn.unlink(missing_ok=True)
            for name in {part.name.split(".")[1] for part in folder.glob(".step-*.part")}:
                finish_write(folder / f"{name}.pt")
        except OSError as error:
            reason = error.strerror
            if isinstance(error, (FileExistsError, NotADirectoryError)):
                reason = "this path, or a part of it, is not a folder"
            raise TrainError(
                Exit.CANNOT_WRITE, f"--checkpoint-dir {folder} cannot be written: {reason}; give another folder"
            ) from None

    def path(self, step: int) -> Path:
        """Return the path of a step's checkpoint."""
        return checkpoint_path(self.folder, step)

    def checkpoints(self) -> list[Path]:
        """Return the paths of the checkpoints, newest first, including incomplete ones. Raises OSError."""
        return list_checkpoints(self.folder)

    def num_bad(self) -> int:
        """Return the number of checkpoints that were renamed because they are corrupt."""
        return len(list(self.folder.glob(f"step-*.pt{SUFFIX_BAD}")))

    def set_aside(self, path: Path) -> str:
        """Rename the files of a corrupt checkpoint. Return a phrase for a message, such as "is renamed to NAME"."""
        try:
            for file in (*data_files(path), manifest_path(path)):
                if file.exists():
                    file.replace(file.with_name(file.name + SUFFIX_BAD))
        except OSError as error:
            return f"is skipped, and cannot be renamed ({error.strerror})"
        return f"is renamed to {path.name}{SUFFIX_BAD}"

    def delete_old(self, *, keep: int, keep_best: bool, written: Path) -> int:
        """Delete old checkpoints. Return how many checkpoints are left.

        Keep the newest ``keep`` and the checkpoint ``written``. If ``keep_best`` is set, keep the best one too. If
        ``keep`` is 0, delete nothing. Raises OSError, after the other old ones are deleted, if one cannot be deleted.
        """
        paths = self.checkpoints()
        old = paths[keep:] if keep else []
        best = next(iter(by_accuracy(paths)), None) if keep_best and old else None
        failure: OSError | None = None
        for path in old:
            if path not in (best, written) and not (keep_best and _may_be_best(path)):
                try:
                    for file in (*data_files(path), manifest_path(path)):
                        file.unlink(missing_ok=True)
                except OSError as error:
                    failure = failure or error
                else:
                    paths.remove(path)
        if failure is not None:
            raise failure
        return len(paths)

    def _lock(self) -> None:
        """Lock the folder. A forked child process does not keep the lock."""
        lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        self.unlock = weakref.finalize(self, os.close, lock)
        os.register_at_fork(after_in_child=self.unlock)
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            raise OSError(errno.EINVAL, f"{LOCK} is not a regular file")
        deadline = time.monotonic() + LOCK_WAIT_S
        try:
            while (state := locks.lock_for_all_hosts(lock, self.folder / LOCK)) is not locks.Lock.TAKEN:
                if state is locks.Lock.UNSUPPORTED:
                    raise OSError(errno.ENOTSUP, "the file system has no locks")
                if time.monotonic() > deadline:
                    holder = os.read(lock, 200).decode(errors="replace").strip() or "another process"
                    raise TrainError(
                        Exit.CANNOT_WRITE,
                        f"--checkpoint-dir {self.folder} is in use by {holder}",
                        hint="stop that training, or give another folder",
                    )
                time.sleep(0.1)
        except OSError as error:
            advice = "check that no other training uses this folder"
            log_warning(f"{self.folder / LOCK} cannot be locked: {error.strerror}; {advice}")
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def check_shared(folder: Path, rank_info: RankInfo) -> None:
    """Raise TrainError unless all ranks see the same folder. Every rank must call this.

    In a sharded training, the ranks write the shards of a checkpoint into this folder.
    """
    token = folder / f".shared-{broadcast(rank_info, secrets.token_hex(8))}"

    def look() -> None:
        if not token.exists():
            raise config_error(
                f"rank {rank_info.rank} does not see rank 0's --checkpoint-dir {folder}, to which each rank writes",
                hint="give a folder that all nodes share, or --strategy ddp",
            )

    try:
        agree(rank_info, token.touch if rank_info.is_first else lambda: None)
        agree(rank_info, look)
    finally:
        if rank_info.is_first:
            token.unlink(missing_ok=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints in a folder, newest first, including incomplete ones. Raises OSError."""
    steps = {int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return [checkpoint_path(folder, step) for step in sorted(steps, reverse=True)]


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's file name, or None for any other file name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def by_accuracy(paths: Sequence[Path]) -> list[Path]:
    """Return the checkpoints of known accuracy, the most accurate first, and equal ones in the given order."""
    known: list[tuple[float, Path]] = []
    for path in paths:
        with contextlib.suppress(UnusableCheckpoint, OSError):
            if (accuracy := read_manifest(path).accuracy) is not None:
                known.append((accuracy, path))
    return [path for _, path in sorted(known, key=lambda item: -item[0])]


def read_checkpoint(path: Path, check: Callable[[Sequence[DataFile]], object] = check_files) -> Checkpoint:
    """Return a checkpoint, verified against its manifest and its name. See `load_checkpoint`."""
    checkpoint = read_again(lambda: load_checkpoint(path, check))
    if step_of(path) not in (None, checkpoint.step):
        raise CorruptCheckpoint("corrupt", f"its name does not match its step {checkpoint.step}")
    return checkpoint


def first_whole(
    paths: Sequence[Path], read: Callable[[Path], Checkpoint] = read_checkpoint
) -> tuple[tuple[Path, Checkpoint] | None, dict[Path, UnusableCheckpoint]]:
    """Return the first usable checkpoint, or None, and the errors of the unusable checkpoints before it.

    Raises TrainError if another version of ddptrain wrote one of them.
    """
    bad: dict[Path, UnusableCheckpoint] = {}
    for path in paths:
        try:
            return (path, read(path)), bad
        except OtherFormat as error:  # it may be whole
            message = f"{path} cannot be used: {error.message}"
            hint = "install the version that wrote it, or give another folder"
            raise config_error(message, hint=hint) from None
        except UnusableCheckpoint as error:
            bad[path] = error
        except OSError as error:
            bad[path] = UnusableCheckpoint("io", str(error.strerror))
    return None, bad


def read_again(read: Callable[[], T]) -> T:
    """Return the result of ``read``. Repeat the call after an error that may be temporary. Raises the last error."""
    tries = READ_TRIES
    while True:
        tries -= 1
        try:
            return read()
        except MemoryError:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None
        except OSError as error:
            if not tries or error.errno not in PASSING_ERRORS:
                raise
        time.sleep(READ_PAUSE_S)


def _may_be_best(path: Path) -> bool:
    """Return True if the manifest cannot be read at present. In that case, the checkpoint may be the best one."""
    try:
        with contextlib.suppress(UnusableCheckpoint):
            read_manifest(path)
    except OSError:
        return True
    return False


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return folder / f"step-{step:08d}.pt"
