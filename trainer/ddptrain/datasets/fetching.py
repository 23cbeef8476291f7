"""What mnist and cifar10 share: torchvision's downloads and readers, made to fail in one line."""

import contextlib
import io
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ddptrain.errors import TrainError
from ddpwire.exits import Exit

T = TypeVar("T")

CONNECT_TIMEOUT_S = 30.0


def fetch(name: str, files: tuple[Path, ...], get: Callable[[], object]) -> None:
    """Have torchvision look for the files, unpack or download them. ``files``: what a person can put there instead.

    Raises TrainError.
    """
    folder = files[0].parent
    talk = io.StringIO()  # a progress bar, and one complaint a mirror
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(CONNECT_TIMEOUT_S)  # torchvision waits for a silent mirror for minutes
    try:
        with contextlib.redirect_stdout(talk), contextlib.redirect_stderr(talk):
            get()
    except PermissionError as error:
        raise TrainError(Exit.CANNOT_WRITE, f"{name} cannot be written to {folder}: {error.strerror}") from None
    except NotADirectoryError:
        raise TrainError(Exit.CANNOT_WRITE, f"{name} cannot be written to {folder}: not a folder") from None
    except Exception as error:  # noqa: BLE001, RUF100 - of urllib, tarfile, gzip, zlib and torchvision itself
        there = [path.name for path in files if path.exists()]
        names = ", ".join(path.name for path in files)
        if len(there) == len(files):
            raise TrainError(Exit.DATA, f"{name} is corrupt: delete {names} in {folder} and get it again") from error
        raise TrainError(
            Exit.NO_INPUT, f"{name} is not in {folder} and cannot be downloaded from here: put {names} there"
        ) from error
    finally:
        socket.setdefaulttimeout(before)


def read(name: str, folder: Path, get: Callable[[], T]) -> T:
    """What ``get`` reads. Raises TrainError for whatever torchvision's readers trip over."""
    try:
        return get()
    except (
        OSError,
        EOFError,
        ValueError,
        AssertionError,
        RuntimeError,
        KeyError,
        IndexError,
        pickle.PickleError,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TrainError(Exit.DATA, f"{name} in {folder} is corrupt: {reason}") from error
