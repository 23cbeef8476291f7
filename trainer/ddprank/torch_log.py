"""The log level of torch's C++ code, in a process that has imported torch. This module does not import torch."""

import contextlib
import ctypes
import os
from pathlib import Path

CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"  # https://docs.pytorch.org/docs/stable/distributed.html#debugging


def set_cpp_log_level(level: str, torch_file: str) -> None:
    """Set TORCH_CPP_LOG_LEVEL and make torch read it again. ``torch_file`` is ``torch.__file__``.

    torch reads the variable only when it is imported. No public function reads the variable later, so this function
    calls ``c10::initLogging``. If a build of torch does not have that function, the level does not change.
    """
    os.environ[CPP_LOG_LEVEL] = level
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(str(Path(torch_file).parent / "lib" / "libc10.so"))._ZN3c1011initLoggingEv()  # c10::initLogging()
