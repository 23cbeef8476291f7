"""What a rank resumes from: its first step, and the files of the checkpoint folder that it reads before its second one.

ddprun starts the record in forked ranks, and compares the ranks' records. An audit hook cannot be removed, so it does
nothing after these steps. It does not see files that C or Rust code opens, as safetensors does.
"""

import json
import math
import os
import stat
import sys
from collections.abc import Mapping
from typing import Any, Final

from ddprank.heartbeat import HEARTBEAT_FILE
from ddpwire import names

RESUME_SUFFIX: Final = ".resume"  # of the record, which is beside the rank's heartbeat
MAX_FILES = 64
EDGE_BYTES = 1 << 15  # the checksums of torch.save's tensors are at the end of its file
_record: "ResumeRecord | None" = None


class _Guard:
    """Suppresses an exception of a call to C. A script's signal handler has a frame, and its exceptions pass."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> bool:  # noqa: PYI036
        return isinstance(error[1], Exception) and error[2].tb_next is None


def opened_path(args: tuple[Any, ...]) -> tuple[str, bool]:
    """Return the absolute path of the audit event ``open`` (empty: a descriptor), and whether it is to be written."""
    name = args[0] if isinstance(args[0], str) else ""
    with _Guard():  # the current folder may have been deleted
        name = name if name.startswith("/") or not name else f"{os.getcwd()}/{name}"  # noqa: PTH109 (fast)
    return name, bool(args[2] & (os.O_WRONLY | os.O_RDWR))


class ResumeRecord:
    """Collects what this process resumes from. It does nothing in a process that the script forks."""

    def __init__(self, folder: str, path: str) -> None:
        self._folders = tuple(f"{place}/" for place in (os.path.abspath(folder), os.path.realpath(folder)))  # noqa: PTH100
        self._path, self._pid = path, os.getpid()
        self._opened: dict[str, str] = {}  # names in the folder, and paths
        self._first: Any = None  # the optimizer that takes the first step
        self._had_state = False  # before that step
        self._is_open = True

        # The audit hook is a plain function: a method takes five times as long at each call of ``id``.
        def audit(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and self._is_open:
                name, writes = opened_path(args)
                path = os.path.normpath(name)
                if not writes and path.startswith(self._folders) and len(self._opened) < MAX_FILES:
                    self._opened[path.removeprefix(self._folders[0]).removeprefix(self._folders[1])] = path

        sys.addaudithook(audit)

    def before_step(self, optimizer: Any) -> None:
        """Note the first optimizer's state before its first step, and write the record before the next step."""
        # torch.distributed.checkpoint takes a step without a learning rate, to make an optimizer's state.
        is_step = self._is_open and any(_number(group.get("lr", 1)) for group in optimizer.param_groups)
        if is_step and self._first is not None:
            self.begin(None)
        elif is_step:
            self._first, self._had_state = optimizer, _has_state(optimizer)

    def begin(self, reported: int | None) -> None:
        """Write the record. ``reported``: the step before the first one that the script has reported, if any."""
        if not self._is_open or os.getpid() != self._pid:
            return
        self._is_open, first = False, self._first
        # An optimizer may never have a state: SGD without momentum, or a rank's part without parameters.
        is_fresh = not self._had_state if first is not None and _has_state(first) else None
        counted = None if first is None else _steps_before(first)
        files = {name: file for name, path in self._opened.items() if (file := _fingerprint(path))}
        record = json.dumps({"reported": reported, "counted": counted, "is_fresh": is_fresh, "files": files})
        with _Guard(), open(f"{self._path}.new", "wb", 0) as output:  # noqa: PTH123
            output.write(record.encode())
            os.rename(f"{self._path}.new", self._path)  # noqa: PTH104
        self._first = None


def _fingerprint(path: str) -> tuple[int, str] | None:
    """Return a file's size and a hash of its beginning and end, or None for a folder and a file that does not exist."""
    import hashlib

    with _Guard():
        if stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
            with open(path, "rb") as file:  # noqa: PTH123
                size, head = os.fstat(file.fileno()).st_size, file.read(EDGE_BYTES)
                file.seek(max(0, size - EDGE_BYTES))
                return size, hashlib.blake2b(head + file.read(), digest_size=8).hexdigest()
    return None


def _number(value: Any) -> float:
    """Return a number, or a tensor of the CPU. Otherwise infinity: to read it could wait for a GPU or other ranks."""
    if type(value).__module__ == "torch" and getattr(value, "is_cpu", False) and value.numel() == 1:
        value = value.item()
    return value if isinstance(value, int | float) and abs(value) < math.inf else math.inf


def _has_state(optimizer: Any) -> bool:
    return any(not isinstance(state, Mapping) or len(state) > 0 for state in optimizer.state.values())


def _steps_before(optimizer: Any) -> int | None:
    """Return the steps before the last one, by the parameter that has taken most. None: it does not count, like SGD."""
    states = (state for state in optimizer.state.values() if isinstance(state, Mapping))
    count = max((_number(state["step"]) for state in states if "step" in state), default=math.inf)
    return None if count == math.inf else int(count) - 1


def record_resume(env: Mapping[str, str]) -> ResumeRecord | None:
    """Start the record of this rank if other ranks' records can be compared with it."""
    global _record
    if env.get(names.WORLD_SIZE) != "1" and {HEARTBEAT_FILE, names.CHECKPOINT_DIR} <= env.keys():
        _record = ResumeRecord(env[names.CHECKPOINT_DIR], f"{env[HEARTBEAT_FILE]}{RESUME_SUFFIX}")
    return _record


def begin(step: int) -> None:
    """Note that this rank has reported its first step, which is ``step``."""
    if _record:
        _record.begin(step - 1)
