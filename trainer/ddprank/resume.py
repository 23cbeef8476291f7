"""What a rank resumes from: its first step, and the files of the checkpoint folder that it reads before its second one.

ddprun starts the record in forked ranks, and compares the ranks' records. An audit hook cannot be removed, so it does
nothing after these steps. It does not see files that C or Rust code opens, as safetensors does.
"""

import contextlib
import json
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


def opened_path(args: tuple[Any, ...]) -> tuple[str, bool]:
    """Return the absolute path in the arguments of the audit event ``open``, and whether the file is to be written.

    The path is empty if it is only a descriptor.
    """
    name = args[0] if isinstance(args[0], str) else ""
    path = name if name.startswith("/") or not name else os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118 (fast)
    return path, bool(args[2] & (os.O_WRONLY | os.O_RDWR))


class ResumeRecord:
    """Collects what this process resumes from. It does nothing in a process that the script forks."""

    def __init__(self, folder: str, path: str) -> None:
        self._folders = tuple(f"{place}/" for place in (os.path.abspath(folder), os.path.realpath(folder)))  # noqa: PTH100
        self._path, self._pid = path, os.getpid()
        self._files: dict[str, tuple[int, str] | None] = {}
        self._first: Any = None  # the optimizer that takes the first step
        self._is_fresh: bool | None = None  # whether it had no state then
        self._is_open = True

    def install(self) -> None:
        """Add the audit hook. It is a plain function: a method takes five times as long at each call of ``id``."""

        def audit(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and self._is_open:
                with contextlib.suppress(Exception):  # it would be raised in the script
                    self._note(*opened_path(args))

        sys.addaudithook(audit)

    def _note(self, path: str, writes: bool) -> None:
        path = os.path.normpath(path)
        name = next((path[len(folder) :] for folder in self._folders if path.startswith(folder)), "")
        if name and name not in self._files and not writes and len(self._files) < MAX_FILES:
            self._files[name] = None  # the next line opens it again
            self._files[name] = _fingerprint(path)

    def before_step(self, optimizer: Any) -> None:
        """Note the first optimizer's state before its first step, and write the record before the next step."""
        # torch.distributed.checkpoint takes a step without a learning rate, to make an optimizer's state.
        if not self._is_open or not any(group.get("lr", 1) for group in optimizer.param_groups):
            return
        if self._first is None:
            self._first, self._is_fresh = optimizer, not any(optimizer.state.values())
        else:
            self.begin(None)

    def begin(self, reported: int | None) -> None:
        """Write the record. ``reported``: the step before the first one that the script has reported, if any."""
        if not self._is_open or os.getpid() != self._pid:
            return
        self._is_open = False
        with contextlib.suppress(Exception):  # it is not the script's
            counted = None if self._first is None else _steps_before(self._first)
            record = {"reported": reported, "counted": counted, "is_fresh": self._is_fresh}
            with open(f"{self._path}.new", "w") as file:  # noqa: PTH123
                json.dump(record | {"files": {name: file for name, file in self._files.items() if file}}, file)
            os.rename(f"{self._path}.new", self._path)  # noqa: PTH104
        self._first = None


def _fingerprint(path: str) -> tuple[int, str] | None:
    """Return a file's size and a hash of its beginning and end, or None for a folder. -1: there is no such file."""
    import hashlib

    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
            return None
        with open(path, "rb") as file:  # noqa: PTH123
            size, head = os.fstat(file.fileno()).st_size, file.read(EDGE_BYTES)
            file.seek(max(0, size - EDGE_BYTES))
            return size, hashlib.blake2b(head + file.read(), digest_size=8).hexdigest()
    except OSError:
        return -1, ""


def _steps_before(optimizer: Any) -> int | None:
    """Return the number of steps before the optimizer's last one, or None if it does not count them, like SGD."""
    states = (state for state in optimizer.state.values() if isinstance(state, Mapping) and "step" in state)
    return next((int(float(state["step"])) - 1 for state in states), None)


def record_resume(env: Mapping[str, str]) -> ResumeRecord | None:
    """Start the record of this rank if other ranks' records can be compared with it."""
    global _record
    if env.get(names.WORLD_SIZE) != "1" and {HEARTBEAT_FILE, names.CHECKPOINT_DIR} <= env.keys():
        _record = ResumeRecord(env[names.CHECKPOINT_DIR], f"{env[HEARTBEAT_FILE]}{RESUME_SUFFIX}")
        _record.install()
    return _record


def begin(step: int) -> None:
    """Note that this rank has reported its first step, which is ``step``."""
    if _record:
        _record.begin(step - 1)
