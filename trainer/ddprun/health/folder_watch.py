"""Checks whether the node's folder still exists and whether its file system answers.

The process that writes the node's files touches the node's lock file (ddprun.file_writer). This blocks while the file
system does not answer (NFS without its server, fsfreeze). A thread measures how long it ends no call, and may end
the node.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ddprun.files.node_dir import Node
from ddprun.system.errors import NodeError, node_error
from ddpwire import locks
from ddpwire.exits import Exit
from ddpwire.run_files import LOCK

INTERVAL_S = 1.0  # each check is a write
PATH_INTERVAL = 10  # of so many checks, one looks at the path or the owner, which costs requests to a file server
WARN_AFTER_S = 10.0  # a busy disk takes seconds
GIVE_UP_AFTER_S = 45.0  # before another machine takes the folder, which locks.SILENT_S allows after 60 s


class FolderWatch:
    """Calls ``stop`` if the folder was deleted, and ``give_up`` if its file system has not answered for too long.

    Both checks start when the ``with`` block is entered. The end of the block raises NodeError if the folder was
    deleted. The check of the file system goes on until the process ends, because writing the outcome may block as well.
    """

    def __init__(self, node: Node, *, stop: Callable[[], None], give_up: Callable[[NodeError], None]) -> None:
        self._folder, self._files, self._log = node.folder, node.files, node.console.log
        self._stop, self._give_up = stop, give_up
        self._is_over = self._is_gone = False
        self.deleted: NodeError | None = None  # the error that ends the node if its folder is gone

    def __enter__(self) -> None:
        for run in (self._probe, self._watch):
            threading.Thread(target=run, name="folder", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        if self.deleted:
            raise self.deleted

    def _probe(self) -> None:
        lock, path = os.fstat(self._folder.lock_fd), self._folder.path / LOCK
        owner, number = None if self._folder.has_locks else locks.Owner.of_this_process(), 0
        while self._files.call(is_there, path, lock.st_dev, lock.st_ino, not number, None if number else owner):
            number = (number + 1) % PATH_INTERVAL
            time.sleep(INTERVAL_S)
        self._is_gone = True
        if not self._is_over:
            message = f"the node's folder {self._folder.path} was deleted or replaced while the node ran"
            self.deleted = node_error(Exit.CANNOT_WRITE, "unavailable", message)
            self._log(f"{message}: the node stops")
            self._stop()

    def _watch(self) -> None:
        last, silent_s, is_warned, checked_at = -1, 0.0, False, time.monotonic()
        while not self._is_gone:
            # Count at most two intervals for an iteration of this loop, because this process may have been paused.
            passed_s, checked_at = min(time.monotonic() - checked_at, 2 * INTERVAL_S), time.monotonic()
            silent_s = silent_s + passed_s if last == self._files.num_performed else 0.0
            last = self._files.num_performed
            message = f"the file system of {self._folder.path} has not answered for {silent_s:.0f} s"
            if is_warned and not silent_s:
                self._log(f"the file system of {self._folder.path} answers again")
            elif silent_s >= WARN_AFTER_S and not is_warned:
                self._log(f"{message}; this node ends after {GIVE_UP_AFTER_S:g} s")
            is_warned = silent_s >= WARN_AFTER_S
            if silent_s >= GIVE_UP_AFTER_S:
                self._give_up(node_error(Exit.CANNOT_WRITE, "unavailable", message))
                return
            time.sleep(INTERVAL_S)


_touched: dict[Path, int] = {}  # in the process that touches it: the lock file, which stays open


def is_there(path: Path, device: int, inode: int, by_path: bool, owner: locks.Owner | None = None) -> bool:
    """Touch the lock file, which blocks while the file system does not answer.

    Return whether the path still leads to this file, or True without ``by_path``. Without locks, write the ``owner``
    instead, and return whether the record is still its own.
    """
    try:
        if path not in _touched:
            _touched[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if owner:
            return owner.keep(path)
        os.utime(_touched[path])  # a write: a frozen file system still answers reads
        about = path.stat() if by_path else None
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # read-only or full, but the file system answers
        return True
    return about is None or (about.st_dev, about.st_ino) == (device, inode)
