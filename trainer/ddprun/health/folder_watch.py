"""Checks whether the node's folder still exists and whether its file system answers.

One thread touches the node's lock file. This blocks while the file system does not answer (NFS without its server,
fsfreeze). A second thread, which uses no files, measures how long the first thread is blocked, and may end the node.
"""

import os
import threading
import time
from collections.abc import Callable

from ddprun.files.node_dir import NodeDir
from ddprun.system.errors import NodeError, node_error
from ddpwire.exits import Exit
from ddpwire.run_files import LOCK

INTERVAL_S = 1.0
WARN_AFTER_S = 10.0
GIVE_UP_AFTER_S = 45.0


class FolderWatch:
    """Calls ``stop`` if the folder was deleted, and ``give_up`` if its file system has not answered for too long.

    Both checks start when the ``with`` block is entered. The end of the block raises NodeError if the folder was
    deleted. The check of the file system goes on until the process ends, because writing the outcome may block as well.
    """

    def __init__(
        self,
        folder: NodeDir,
        *,
        log: Callable[[str], None],
        stop: Callable[[], None],
        give_up: Callable[[NodeError], None],
    ) -> None:
        self._folder = folder
        self._log = log
        self._stop = stop
        self._give_up = give_up
        self._num_answers = 0
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
        while self._is_there():
            self._num_answers += 1
            time.sleep(INTERVAL_S)
        self._is_gone = True
        if not self._is_over:
            message = f"the node's folder {self._folder.path} was deleted or replaced while the node ran"
            self.deleted = node_error(Exit.CANNOT_WRITE, "unavailable", message)
            self._log(f"{message}: the node stops")
            self._stop()

    def _is_there(self) -> bool:
        """Return whether the folder still contains this node's lock file. Blocks while the file system hangs."""
        path = self._folder.path / LOCK
        try:
            os.utime(path)  # a write: a frozen file system still answers reads
            return os.path.samestat(path.stat(), os.fstat(self._folder.lock_fd))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # read-only or full, but the file system answers
            return True

    def _watch(self) -> None:
        last, num_silent, is_warned = -1, 0, False
        while not self._is_gone:
            # Count iterations of this loop instead of seconds, because this process may have been paused.
            num_silent = num_silent + 1 if last == self._num_answers else 0
            last = self._num_answers
            silent_s = num_silent * INTERVAL_S
            if is_warned and not num_silent:
                is_warned = False
                self._log(f"the file system of {self._folder.path} answers again")
            if silent_s >= WARN_AFTER_S and not is_warned:
                is_warned = True
                limit = f"this node ends after {GIVE_UP_AFTER_S:g} s"
                self._log(f"the file system of {self._folder.path} has not answered for {silent_s:.0f} s; {limit}")
            if silent_s >= GIVE_UP_AFTER_S:
                message = f"the file system of {self._folder.path} has not answered for {silent_s:.0f} s"
                self._give_up(node_error(Exit.CANNOT_WRITE, "unavailable", message))
                return
            time.sleep(INTERVAL_S)
