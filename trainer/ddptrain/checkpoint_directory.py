"""The checkpoint directory of a training: its lock, its checkpoints, which of them are kept. Only rank 0 uses it."""

import contextlib
import fcntl
import os
import re
import socket
import time
import weakref
from pathlib import Path

from ddptrain.checkpoint import UnusableCheckpoint, finish_write, manifest_path, read_manifest
from ddptrain.errors import TrainError
from ddpwire.exits import Exit

LOCK = ".lock"
LOCK_WAIT_S = 5.0  # a training that was stopped may need as long to exit
SUFFIX_BAD = ".bad"
_NAME = re.compile(r"step-(\d{8,})\.(?:pt|json)")


class CheckpointDirectory:
    """A folder that this process has locked until it exits. Raises TrainError when another process has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".probe-{os.getpid()}"
            try:
                probe.write_bytes(b"\0" * 4096)
            finally:
                probe.unlink(missing_ok=True)
            self._lock()
            self._clean_up()
        except OSError as error:
            in_the_way = isinstance(error, (FileExistsError, NotADirectoryError))
            reason = "there is a file in its place" if in_the_way else error.strerror
            raise TrainError(
                Exit.CANNOT_WRITE, f"--checkpoint-dir {folder} cannot be written: {reason}; give another one"
            ) from None

    def path(self, step: int) -> Path:
        """Return the path of a step's checkpoint."""
        return _path(self.folder, step)

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints, complete or not, newest first. Raises OSError."""
        return list_checkpoints(self.folder)

    def num_bad(self) -> int:
        """Return how many checkpoints were set aside."""
        return len(list(self.folder.glob(f"step-*.pt{SUFFIX_BAD}")))

    def set_aside(self, path: Path) -> str:
        """Rename a corrupt checkpoint. Return what was done, for a message."""
        try:
            for file in (path, manifest_path(path)):
                if file.exists():
                    file.replace(file.with_name(file.name + SUFFIX_BAD))
        except OSError as error:
            return f"is passed over, and cannot be set aside ({error.strerror})"
        return f"is set aside as {path.name}{SUFFIX_BAD}"

    def delete_old(self, *, keep: int, keep_best: bool, written: Path) -> int:
        """Delete all but the newest ``keep`` (0: all), the best and the one just ``written``. Return how many are left.

        Raises OSError.
        """
        paths = self.checkpoints()
        old = paths[keep:] if keep else []
        best = best_checkpoint(paths) if keep_best and old else None
        for path in old:
            if path not in (best, written):
                path.unlink(missing_ok=True)
                manifest_path(path).unlink(missing_ok=True)
                paths.remove(path)
        return len(paths)

    def _lock(self) -> None:
        """Take a POSIX lock, which a forked child does not hold and NFS supports; without file locks, none."""
        lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        weakref.finalize(self, os.close, lock)  # and with the descriptor the lock goes
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):  # held by another process
                if time.monotonic() > deadline:
                    holder = os.read(lock, 200).decode(errors="replace").strip() or "another process"
                    raise TrainError(
                        Exit.CANNOT_WRITE,
                        f"--checkpoint-dir {self.folder} is in use by {holder}",
                        hint="stop that training, or give another one",
                    ) from None
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _clean_up(self) -> None:
        """Complete or remove the writes that a kill has interrupted."""
        for part in self.folder.glob(".step-*.pt.part"):
            finish_write(part.with_name(part.name.removeprefix(".").removesuffix(".part")))
        for torn in self.folder.glob(".step-*.json.*"):
            torn.unlink(missing_ok=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, complete or not, newest first. Raises OSError."""
    steps = {int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return [_path(folder, step) for step in sorted(steps, reverse=True)]


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name; None: it has another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def best_checkpoint(paths: list[Path]) -> Path | None:
    """Return the checkpoint of the highest accuracy, the newest of equals; None: no accuracy is known."""
    best, highest = None, -1.0
    for path in paths:
        with contextlib.suppress(UnusableCheckpoint, OSError):
            accuracy = read_manifest(path).accuracy
            if accuracy is not None and accuracy > highest:
                best, highest = path, accuracy
    return best


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.pt"
