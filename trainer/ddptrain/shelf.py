"""The folder of a training's checkpoints: whose it is, which ones it holds, which are kept. Rank 0 alone comes here."""

import contextlib
import fcntl
import os
import re
import socket
import time
import weakref
from pathlib import Path

from ddptrain.checkpoint import Corrupt, finish, manifest_of, read_manifest
from ddptrain.errors import TrainError
from ddpwire.exits import Exit

LOCK = ".lock"
LOCK_WAIT_S = 5.0  # a training that was stopped may take as long to go
SUFFIX_BAD = ".bad"
_NAME = re.compile(r"step-(\d{8,})\.(?:pt|json)")


class Shelf:
    """A folder that is this process' own for as long as it lives. Raises TrainError when it is another's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".probe-{os.getpid()}"
            try:
                probe.write_bytes(b"\0" * 4096)
            finally:
                probe.unlink(missing_ok=True)
            self._take()
            self._sweep()
        except OSError as error:
            in_the_way = isinstance(error, (FileExistsError, NotADirectoryError))
            reason = "there is a file in its place" if in_the_way else error.strerror
            raise TrainError(
                Exit.CANNOT_WRITE, f"--checkpoint-dir {folder} cannot be written: {reason}; give another one"
            ) from None

    def path(self, step: int) -> Path:
        """The file of a step."""
        return _path(self.folder, step)

    def checkpoints(self) -> list[Path]:
        """Those that are there, whole or not, the newest first."""
        return checkpoints_in(self.folder)

    def num_bad(self) -> int:
        """Those that were set aside."""
        return len(list(self.folder.glob(f"step-*.pt{SUFFIX_BAD}")))

    def set_aside(self, path: Path) -> str:
        """Give a corrupt one another name; what was done, for a person."""
        try:
            for file in (path, manifest_of(path)):
                if file.exists():
                    file.replace(file.with_name(file.name + SUFFIX_BAD))
        except OSError as error:
            return f"is passed over, and cannot be set aside ({error.strerror})"
        return f"is set aside as {path.name}{SUFFIX_BAD}"

    def thin_out(self, *, keep: int, keep_best: bool, written: Path) -> int:
        """Delete all but the newest ``keep`` (0: all), the best and the one just ``written``; how many are left.

        Raises OSError.
        """
        paths = self.checkpoints()
        old = paths[keep:] if keep else []
        kept_for_good = best_of(paths) if keep_best and old else None
        for path in old:
            if path not in (kept_for_good, written):
                path.unlink(missing_ok=True)
                manifest_of(path).unlink(missing_ok=True)
                paths.remove(path)
        return len(paths)

    def _take(self) -> None:
        """Lock it. A POSIX lock: a forked child does not hold it, and NFS knows it; where locks are unknown, none."""
        lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
                        f"--checkpoint-dir {self.folder} is in use by {holder}: "
                        "stop that training, or give another one",
                    ) from None
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _sweep(self) -> None:
        """See to what a killed training left half done."""
        for part in self.folder.glob(".step-*.pt.part"):
            finish(part.with_name(part.name.removeprefix(".").removesuffix(".part")))
        for torn in self.folder.glob(".step-*.json.*"):
            torn.unlink(missing_ok=True)


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, whole or not, the newest first. Raises OSError."""
    steps = {int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return [_path(folder, step) for step in sorted(steps, reverse=True)]


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None: it has another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def best_of(paths: list[Path]) -> Path | None:
    """That of the highest accuracy, the newest of equals; None: none was measured."""
    best, highest = None, -1.0
    for path in paths:
        with contextlib.suppress(Corrupt, OSError):
            accuracy = read_manifest(path).accuracy
            if accuracy is not None and accuracy > highest:
                best, highest = path, accuracy
    return best


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.pt"
