"""A node's lock: whoever holds it is the node. It says nothing about what the node does.

ddprun takes it first and hands it down to its keeper: it is free only when neither is alive, and so no rank is.
"""

import errno
import fcntl
import os
import time
from pathlib import Path

from ddpwire.folder import LOCK

PATIENCE_S = 3.0  # who only asks holds it for an instant, and what an earlier ddprun left ends within 2 s


def take(node_dir: Path) -> int | None:
    """The descriptor that holds the lock until it is closed; None when another ddprun has it. Raises OSError."""
    descriptor = os.open(node_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES) and time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise
        return descriptor


def is_held(node_dir: Path) -> bool:
    """Whether the node's ddprun, or what is left of it, is alive."""
    try:
        descriptor = os.open(node_dir / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
