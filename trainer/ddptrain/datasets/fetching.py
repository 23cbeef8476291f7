"""What mnist, cifar10 and cifar100 share: torchvision's downloads and readers, made to fail in one line."""

import contextlib
import errno
import io
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ddptrain.errors import TrainError
from ddpwire.exits import Exit

T = TypeVar("T")

CONNECT_TIMEOUT_S = 30.0
_CANNOT_WRITE = (errno.EACCES, errno.EEXIST, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS)


def torchvision_datasets() -> Any:  # noqa: ANN401, RUF100 - torchvision has no types
    """torchvision.datasets, imported where it is needed: it takes seconds. Raises TrainError."""
    try:
        import torchvision.datasets
    except ImportError:
        raise TrainError(
            Exit.NO_INPUT, "torchvision, which reads it, is missing: pip install 'ddpctl[train]'"
        ) from None
    return torchvision.datasets


def fetch(name: str, *, archives: tuple[Path, ...], unpacked: tuple[Path, ...], get: Callable[[], object]) -> None:
    """Have torchvision look for the unpacked files, else unpack the archives, else download them. Raises TrainError."""
    talk = io.StringIO()  # a progress bar, and one complaint a mirror
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(CONNECT_TIMEOUT_S)  # torchvision waits for a silent mirror for minutes
    try:
        with contextlib.redirect_stdout(talk), contextlib.redirect_stderr(talk):
            get()
    except Exception as error:
        folder = archives[0].parent
        files = ", ".join(path.name for path in archives)
        if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
            raise TrainError(Exit.CANNOT_WRITE, f"{name} cannot be written to {folder}: {error.strerror}") from error
        if any(all(path.exists() for path in files_there) for files_there in (archives, unpacked)):
            raise TrainError(Exit.DATA, f"{name} in {folder} is corrupt: delete it, and get {files} again") from error
        message = f"{name} is not in {folder} and cannot be downloaded from here: put {files} there"
        raise TrainError(Exit.NO_INPUT, message) from error
    finally:
        socket.setdefaulttimeout(before)


def read(name: str, folder: Path, get: Callable[[], T]) -> T:
    """What ``get`` reads. Raises TrainError for whatever torchvision's readers trip over."""
    try:
        return get()
    except (OSError, EOFError, ValueError, AssertionError, RuntimeError, LookupError, pickle.PickleError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TrainError(Exit.DATA, f"{name} in {folder} is corrupt: {reason}") from error
