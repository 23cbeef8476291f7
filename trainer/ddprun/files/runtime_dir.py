"""The runtime folder: the live state of a node's ranks, in the node's memory (docs/decisions/0048-runtime-folder.md).

RUNTIME/                   node.json names it; only its owner can read it
  metrics/rank-1/          prometheus_client's files of rank 1
  heartbeat/rank-1         rank 1's last step in the current attempt (ddprank.heartbeat)
  heartbeat/rank-1.group   exists if ddprun forked rank 1 and rank 1 has made a process group
  heartbeat/rank-1.sock    the socket at which rank 1 answers (ddprun.rank_server)
  heartbeat/group...       each link names the process that has claimed a rank in a process group (only for ddprun)

ddprun holds a lock on the folder. If ddprun was killed, the next ddprun of the same user removes the folder. A logout
may empty it (XDG_RUNTIME_DIR, or systemd's RemoveIPC). Then it is made anew; ranks that run have mapped their files
already.
"""

import contextlib
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from ddpwire import locks
from ddpwire.run_files import HEARTBEAT, METRICS

PREFIX = "ddprun-runtime-"


class RuntimeDir:
    """The runtime folder of this ddprun. ``path`` changes only if the folder cannot be made anew where it was."""

    def __init__(self, run: str, node: int, environ: Mapping[str, str]) -> None:
        """Remove the folders of ddpruns that have ended, and make a new one. Raises OSError."""
        # Where a runtime folder may be made, the best place first.
        places = map(Path, (environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm", tempfile.gettempdir()))  # noqa: S108 (mkdtemp)
        usable = os.W_OK | os.X_OK
        self._bases = [path for path in places if path.is_absolute() and path.is_dir() and os.access(path, usable)]
        self._prefix = f"{PREFIX}{re.sub(r'[^A-Za-z0-9._-]', '_', run)[:32]}-node-{node}-{os.getpid()}-"
        self._changing = threading.RLock()  # several threads use the folder
        self._is_removed = False
        self._lock = -1
        self.vanished = False  # whether it was made anew in this attempt
        for base in self._bases:
            _sweep(base)
        self._make()

    def __fspath__(self) -> str:
        return str(self.path)

    def begin_attempt(self) -> None:
        """Prepare the folder for ranks that are about to start. Raises OSError."""
        with self._changing:
            if self.restore() and not self._is_there():  # its parent is gone, but these ranks can use another place
                self._make()
            shutil.rmtree(self.path / HEARTBEAT, ignore_errors=True)
            (self.path / HEARTBEAT).mkdir()
            self.vanished = False

    def restore(self) -> bool:
        """Make the folder anew, at the same place, if it has vanished. Return whether it had."""
        with self._changing:
            if self._is_removed or (self._is_there() and (self.path / HEARTBEAT).exists()):
                return False
            self.vanished = True
            with contextlib.suppress(OSError):  # its parent is gone: this attempt's heartbeats and metrics are unknown
                self.path.mkdir(mode=0o700, exist_ok=True)
                self._fill()
            return True

    def remove(self) -> None:
        """Remove the folder for good."""
        with self._changing:
            self._is_removed = True
            shutil.rmtree(self.path, ignore_errors=True)

    def _make(self) -> None:
        for base in self._bases:
            with contextlib.suppress(OSError):  # it cannot be written, or is full: the next one
                self.path = Path(tempfile.mkdtemp(prefix=f".{self._prefix}", dir=base))
                self._fill()
                self.path = self.path.rename(base / self.path.name[1:])  # it is locked, so no other ddprun removes it
                return
        raise OSError(f"no folder for the ranks' state can be made in {', '.join(map(str, self._bases))}")

    def _fill(self) -> None:
        """Lock the folder, and make the folders in it. Raises OSError."""
        if not self._is_there():
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            locks.lock(descriptor, self.path, wait_s=1.0)  # another ddprun may be removing it: then it is gone
            if self._lock >= 0:
                os.close(self._lock)
            self._lock = descriptor
        for name in (HEARTBEAT, METRICS):
            (self.path / name).mkdir(exist_ok=True)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._lock), self.path.lstat())
        except OSError:
            return False


def _sweep(base: Path) -> None:
    """Remove this user's runtime folders whose ddprun has ended. Without locks, nothing is known of their ddpruns."""
    for path in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is no folder, another user's, or another ddprun is removing it
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                is_own = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
                if is_own and locks.lock(descriptor, path) is locks.Lock.TAKEN:
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
