"""The runtime folder: the live state of a node's ranks, in the node's memory (docs/decisions/0048-runtime-folder.md).

RUNTIME/                   node.json names it; only its owner can read it
  metrics/rank-1/          prometheus_client's files of rank 1
  heartbeat/rank-1         rank 1's last step in the current attempt (ddpwire.heartbeat)
  heartbeat/rank-1.group   exists if ddprun forked rank 1 and rank 1 has made a process group
  heartbeat/rank-1.sock    the socket at which rank 1 answers (ddprun.rank_server)
  heartbeat/group...       each link names the process that has claimed a rank in a process group (only for ddprun)

ddprun holds a lock on the folder. If ddprun was killed, the next start of the run on this machine continues the folder,
or the next ddprun removes it. A logout may empty the folder (XDG_RUNTIME_DIR, or systemd's RemoveIPC). Then it is made
anew; ranks that run have mapped their files already.
"""

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ddpwire import locks
from ddpwire.run_files import HEARTBEAT, METRICS

PREFIX = "ddprun-runtime-"


class RuntimeDir:
    """The runtime folder of this ddprun. ``path`` changes only if the folder cannot be made anew where it was."""

    def __init__(self, run: str, node: int, environ: Mapping[str, str], previous: str = "") -> None:
        """Continue the folder ``previous`` of an earlier start if it is there, or else make a new one.

        Remove the folders of ddpruns that have ended. Raises OSError.
        """
        self._bases = [*_bases(environ)]
        self._prefix = f"{PREFIX}{re.sub(r'[^A-Za-z0-9._-]', '_', run)[:32]}-node-{node}-{os.getpid()}-"
        self._lock = -1
        self.vanished = False  # whether it was made anew in this attempt
        self.path = Path(previous) if Path(previous).name.startswith(PREFIX) else Path()
        self.continues = self.path.name != "" and self._take()
        if not self.continues:
            self._make()
        for base in self._bases:
            _sweep(base)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def metrics(self) -> Path:
        """The folder with a folder of prometheus_client's files for each rank."""
        return self.path / METRICS

    def begin_attempt(self) -> None:
        """Prepare the folder for ranks that are about to start. Raises OSError."""
        if not self._is_there():
            try:
                self.path.mkdir(mode=0o700)
                self._take()
            except OSError:  # its parent is gone: the ranks that are about to start can use another place
                self._make()
        shutil.rmtree(self.path / HEARTBEAT, ignore_errors=True)
        for name in (HEARTBEAT, METRICS):
            (self.path / name).mkdir(exist_ok=True)
        self.vanished = False

    def restore(self) -> bool:
        """Make the folder anew, at the same place, if it has vanished. Return whether it had."""
        if self._is_there() and (self.path / HEARTBEAT).exists():
            return False
        self.vanished = True
        with contextlib.suppress(OSError):  # its parent is gone: heartbeats and metrics stay unknown in this attempt
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._take()
            for name in (HEARTBEAT, METRICS):
                (self.path / name).mkdir(exist_ok=True)
        return True

    def remove(self) -> None:
        """Remove the folder."""
        if self._is_there():
            shutil.rmtree(self.path, ignore_errors=True)

    def _make(self) -> None:
        for base in self._bases:
            with contextlib.suppress(OSError):  # it cannot be written, or is full: the next one
                self.path = Path(tempfile.mkdtemp(prefix=self._prefix, dir=base))
                if self._take():
                    for name in (HEARTBEAT, METRICS):
                        (self.path / name).mkdir()
                    return
        raise OSError(f"no folder for the ranks' state can be made in {', '.join(map(str, self._bases))}")

    def _take(self) -> bool:
        """Lock the folder. Return False if it is gone, or another process or user has it."""
        descriptor = _open_own(self.path)
        if descriptor is None:
            return False
        with contextlib.suppress(OSError):  # it was removed meanwhile
            is_busy = locks.lock(descriptor, self.path) is locks.Lock.BUSY
            if not is_busy and os.path.samestat(os.fstat(descriptor), self.path.lstat()):
                if self._lock >= 0:
                    os.close(self._lock)
                self._lock = descriptor
                return True
        os.close(descriptor)
        return False

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._lock), self.path.lstat())
        except OSError:
            return False


def _bases(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the folders in which a runtime folder may be made, the best one first."""
    for base in (environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm", tempfile.gettempdir()):  # noqa: S108 (made with mkdtemp)
        if Path(base).is_absolute() and Path(base).is_dir() and os.access(base, os.W_OK | os.X_OK):
            yield Path(base)


def _open_own(path: Path) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    about = os.fstat(descriptor)
    if about.st_uid == os.geteuid() and not stat.S_IMODE(about.st_mode) & 0o077:
        return descriptor
    os.close(descriptor)
    return None


def _sweep(base: Path) -> None:
    """Remove this user's runtime folders whose ddprun has ended. Without locks, nothing is known of their ddpruns."""
    for path in base.glob(f"{PREFIX}*"):
        descriptor = _open_own(path)
        if descriptor is not None:
            with contextlib.suppress(OSError):  # another ddprun is removing it
                if locks.lock(descriptor, path) is locks.Lock.TAKEN:
                    shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)
