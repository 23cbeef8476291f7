"""File locks, and what replaces them where a file system has none (Lustre without ``-o flock``, some FUSE mounts).

There, the owner of a file writes a record beside it: its machine, its process, and a time that it changes every few
seconds. A process of the same machine sees whether the owner is alive. A process of another machine watches the record
for SILENT_S. An owner that could not write for so long has ended itself, or was paused; when it goes on, it sees that
the record is another's, and ends (decision 0048).
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
import time
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path

OWNER_SUFFIX = ".owner"
SILENT_S = 60.0  # an owner that has not written for so long has ended: its ddprun gives up after 45 s without its disk
POLL_S = 0.02  # other holders keep a lock for an instant
_BUSY = (errno.EAGAIN, errno.EACCES)
_UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class Lock(Enum):
    """The result of an attempt to lock a file."""

    TAKEN = "taken"
    BUSY = "busy"  # another process has locked the file
    UNSUPPORTED = "unsupported"  # the file system has no locks


def lock(descriptor: int, path: Path, *, shared: bool = False, wait_s: float | None = 0.0) -> Lock:
    """Lock an open file (flock). Wait at most ``wait_s`` for another process, None: without a limit.

    Raises OSError, with the name of the file, for any error except that locks are not supported.
    """
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait_s is None else fcntl.LOCK_NB)
    deadline = time.monotonic() + (wait_s or 0.0)
    while True:
        try:
            fcntl.flock(descriptor, kind)
            return Lock.TAKEN
        except OSError as error:
            if (state := _state(error, path)) is Lock.UNSUPPORTED or time.monotonic() >= deadline:
                return state
        time.sleep(POLL_S)


def lock_for_all_hosts(descriptor: int, path: Path) -> Lock:
    """Lock an open file with a lock that NFS passes on to other machines. Raises OSError as ``lock`` does.

    The lock belongs to the open file (F_OFD_SETLK, fcntl(2)). It remains when another descriptor of the file is closed.
    Where F_OFD_SETLK is missing (an older kernel, macOS), the lock belongs to the process. A lock of one kind also
    blocks a lock of the other kind.
    """
    whole_file = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock
    try:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, whole_file)
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", None) in _BUSY:
                raise
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return _state(error, path)
    return Lock.TAKEN


def is_locked(path: Path) -> bool:
    """Return whether a process has locked a file, or owns it if there are no locks. Raises OSError, as open does."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO does not block
    try:
        state = lock(descriptor, path, shared=True)
    finally:
        os.close(descriptor)
    if state is not Lock.UNSUPPORTED:
        return state is Lock.BUSY
    owner = read_owner(path)
    if owner is None:
        return False
    alive = owner.is_alive()
    return abs(time.time() - owner.time) < SILENT_S if alive is None else alive


def _state(error: OSError, path: Path) -> Lock:
    if error.errno in _BUSY:
        return Lock.BUSY
    if error.errno in _UNSUPPORTED:
        return Lock.UNSUPPORTED
    raise OSError(error.errno, error.strerror, str(path)) from None


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that owns a file."""

    host: str
    machine: str  # the boot and the pid namespace: in both, ``pid`` is unique
    pid: int
    started: str  # in clock ticks since the boot; a pid may be used again
    time: float  # when the record was written

    @classmethod
    def of_this_process(cls) -> "Owner":
        """Return the record of this process, written now."""
        pid = os.getpid()
        return cls(host=socket.gethostname(), machine=_machine(), pid=pid, started=_started(pid), time=time.time())

    def is_alive(self) -> bool | None:
        """Return whether the owner is alive, or None if it runs on another machine."""
        return _started(self.pid) == self.started if self.machine == _machine() else None

    def keep(self, path: Path) -> bool:
        """Write the record again. Return False if another process owns the file now. Raises OSError."""
        current = read_owner(path)
        is_own = current is None or replace(current, time=self.time) == self
        if is_own:
            replace(self, time=time.time()).write(path)
        return is_own

    def write(self, path: Path) -> None:
        """Write the record beside the file ``path``. Raises OSError."""
        new = path.with_name(f".{path.name}{OWNER_SUFFIX}.{os.getpid()}")
        new.write_text(json.dumps(asdict(self)))
        new.replace(path.with_name(path.name + OWNER_SUFFIX))


def read_owner(path: Path) -> Owner | None:
    """Return the owner of the file ``path``, or None if it has no complete record."""
    try:
        return Owner(**json.loads(path.with_name(path.name + OWNER_SUFFIX).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def owner_that_writes(path: Path, *, timeout_s: float = SILENT_S) -> Owner | None:
    """Return the owner of a file if it is alive here, or if it writes its record within ``timeout_s`` elsewhere."""
    first = read_owner(path)
    if first is None or first.is_alive() is not None:
        return first if first and first.is_alive() else None
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(left_s, 1.0))
        if (owner := read_owner(path)) and owner.time != first.time:
            return owner
    return None


def disown(path: Path) -> None:
    """Remove the record of a file's owner."""
    with contextlib.suppress(OSError):  # there is none, or it stays and shows a process that has ended
        path.with_name(path.name + OWNER_SUFFIX).unlink(missing_ok=True)


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()


def _started(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):  # it has ended, or this is not Linux
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    with contextlib.suppress(OSError):  # it has ended
        if not Path("/proc/self").exists():
            os.kill(pid, 0)
            return "running"
    return ""
