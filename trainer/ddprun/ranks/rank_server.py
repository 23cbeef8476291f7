"""What a forked rank can report while it hangs: the stacks of its Python threads, and torch's flight recorder.

A signal handler in C (faulthandler) writes the stacks into a memory file, which ddprun finds among the process's
descriptors. The handler works even while a thread holds the GIL. Processes that the rank forks (DataLoader workers)
inherit the file. ddprun does not signal a process without this file, such as a program that the rank executes.

A thread sends the flight recorder's data or a profile over a Unix socket, which is in the folder of the rank's
heartbeat. The thread is started when the rank creates its first process group. It is started without ``threading``, so
that scripts do not see it.
"""

import _thread
import atexit
import contextlib
import faulthandler
import fcntl
import functools
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddprank.heartbeat import HEARTBEAT_FILE
from ddprun.system import compat
from ddpwire.run_files import parse_json

STACKS = "ddprun-stacks"  # the name of the memory file
STACKS_SIGNAL = getattr(signal, "SIGRTMAX", 64) - 6
SOCKET_SUFFIX = ".sock"


def offer_stacks(env: Mapping[str, str]) -> None:
    """Make faulthandler write this process's stacks into a memory file when the process gets STACKS_SIGNAL.

    Processes that it forks do the same.
    """
    if HEARTBEAT_FILE not in env:
        return
    with contextlib.suppress(OSError, AttributeError, ValueError):  # not Linux, or few descriptors: no stacks
        low = os.memfd_create(STACKS)
        try:
            # At least 200, so that a script gets the same low numbers as without the memory file.
            descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 200)
        finally:
            os.close(low)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True, chain=False)


def serve(heartbeat: Path) -> None:
    """Start a thread that answers requests, or do nothing if no socket can be made."""
    with contextlib.suppress(OSError):
        listener = socket.socket(socket.AF_UNIX)
        with short_path(heartbeat.with_name(f"{heartbeat.name}{SOCKET_SUFFIX}")) as path:
            os.fchmod(listener.fileno(), 0o600)  # the mode of the file that bind creates
            listener.bind(path)
        listener.listen()
        _thread.start_new_thread(_serve, (listener,))


def _serve(listener: socket.socket) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the script has closed all descriptors
            return
        _thread.start_new_thread(_answer, (connection,))


def _answer(connection: socket.socket) -> None:
    with connection, contextlib.suppress(Exception):  # without an answer, ddprun reports that there is none
        connection.settimeout(5.0)
        request = json.loads(connection.recv(1 << 12))
        try:
            reply = json.dumps(record(**request)).encode() if request else compat.flight_recorder()
        except Exception as error:
            reply = json.dumps({"unknown": f"it cannot be profiled: {error}"}).encode()
        connection.sendall(reply)


def ask(heartbeat: Path, timeout_s: float, **request: object) -> Any:
    """Ask a rank for a profile or for its flight recorder, and return the answer.

    ``request``: the arguments of ``record``. Without them, the rank sends its flight recorder. Raises OSError,
    TimeoutError or ValueError.
    """
    deadline, data = time.monotonic() + timeout_s, b""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        with short_path(heartbeat.with_name(f"{heartbeat.name}{SOCKET_SUFFIX}")) as short:
            connection.connect(short)
        connection.sendall(json.dumps(request).encode())
        while (block := connection.recv(1 << 20)) and len(data) < 1 << 24:
            data += block
            if time.monotonic() > deadline:
                raise TimeoutError("timed out")
    return parse_json(data)


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield another path that leads to the same file as ``path``.

    This path is short enough for a Unix socket's address (108 bytes).
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


# ---- Recording what a rank does: torch's profile of all threads, and samples of the main thread's stack.
#
# torch has one profiler per process, and a second one crashes the process with SIGSEGV. So nothing is recorded while
# the script's own profiler is ready to start or running. A recording ends early when the script starts a profiler,
# before a fork (the child would record forever), and before the process exits.

_own_thread = threading.local()
_end, _is_free = threading.Event(), threading.Event()
_is_free.set()


def end_recording() -> None:
    """If another thread is recording, end its recording. Then wait until torch's profiler is free."""
    if not hasattr(_own_thread, "records"):
        _end.set()
        _is_free.wait(10.0)


@functools.cache
def _watch_script() -> None:
    os.register_at_fork(before=end_recording)
    atexit.register(end_recording)
    compat.before_profiler(end_recording)


def record(trace: str, seconds: float) -> dict[str, Any]:
    """Record for ``seconds``, write a Chrome trace into the file ``trace``, and return the time span and the samples.

    Times are in seconds since the epoch. A stack begins with the innermost frame. If nothing is recorded, the result
    has only the key ``unknown`` with the reason.
    """
    _watch_script()
    _own_thread.records = True
    _end.clear()
    _is_free.clear()
    try:
        if compat.has_profiler():
            return {"unknown": "not recorded, because the script runs its own profiler"}
        began, samples = time.time(), []
        with compat.profile_all_threads() as recording:
            while time.time() < began + seconds and not _end.wait(0.02):
                samples.append((time.time(), _main_stack()))
            ended = time.time()
    finally:
        _is_free.set()
    recording.export_chrome_trace(trace)
    return {"began": began, "ended": ended, "samples": samples}


def _main_stack() -> list[tuple[str, int, str]]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 (it is documented)
    stack = itertools.islice(traceback.walk_stack(frame), 24) if frame else ()
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in stack]
