"""Torch's C++ kept quiet while the ranks meet: what goes wrong there is an exception, and its stacks bury our one line.

Only then: the NCCL group is made later, and its warnings and errors are printed as ever.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import torch

LEVEL = "TORCH_CPP_LOG_LEVEL"


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """No word of torch's C++; who has set a level of their own gets it."""
    if LEVEL in os.environ:
        yield
        return
    _set("FATAL")
    try:
        yield
    finally:
        _set("WARNING")  # torch's own default


def _set(level: str) -> None:
    os.environ[LEVEL] = level
    with contextlib.suppress(OSError, AttributeError):  # another build: then there are lines too many
        library = Path(torch.__file__).parent / "lib" / "libc10.so"
        ctypes.CDLL(str(library))._ZN3c1011initLoggingEv()  # c10::initLogging(), which reads the variable again
    del os.environ[LEVEL]
