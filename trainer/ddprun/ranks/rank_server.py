"""What a forked rank can report while it hangs: the stacks of its Python threads, and torch's flight recorder.

A signal handler in C (faulthandler) writes the stacks into a memory file, which ddprun finds among the process's
descriptors. The handler works even while a thread holds the GIL. Processes that the rank forks (DataLoader workers)
inherit the file. ddprun does not signal a process without this file, such as a program that the rank executes.

A thread sends the flight recorder's data or a profile over a Unix socket, which is in the folder of the rank's
heartbeat. The thread is started when the rank creates its first process group. It is started without ``threading``, so
that scripts do not see it.
"""

import _thread
import contextlib
import faulthandler
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddprun.ranks import rank_profiler
from ddprun.system import compat
from ddpwire.heartbeat import HEARTBEAT_FILE
from ddpwire.run_files import parse_json

STACKS = "ddprun-stacks"  # the name of the memory file
STACKS_SIGNAL = getattr(signal, "SIGRTMAX", 64) - 6
FIRST_DESCRIPTOR = 200  # so that a script gets the same low numbers as without the memory file
SOCKET_SUFFIX = ".sock"
SEND_TIMEOUT_S = 5.0
MAX_REQUEST_BYTES, MAX_REPLY_BYTES = 1 << 12, 1 << 24


def offer_stacks(env: Mapping[str, str]) -> None:
    """Make faulthandler write this process's stacks into a memory file when the process gets STACKS_SIGNAL.

    Processes that it forks do the same.
    """
    if HEARTBEAT_FILE not in env:
        return
    with contextlib.suppress(OSError, AttributeError, ValueError):  # not Linux, or few descriptors: no stacks
        low = os.memfd_create(STACKS)
        try:
            descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
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
        connection.settimeout(SEND_TIMEOUT_S)
        wanted = json.loads(connection.recv(MAX_REQUEST_BYTES))
        try:
            reply = json.dumps(rank_profiler.record(**wanted)).encode() if wanted else compat.flight_recorder()
        except Exception as error:
            reply = json.dumps({"unknown": f"it cannot be profiled: {error}"}).encode()
        connection.sendall(reply)


def ask(heartbeat: Path, timeout_s: float, **wanted: object) -> Any:
    """Ask a rank for a profile or for its flight recorder, and return the answer.

    ``wanted``: the arguments of ``rank_profiler.record``. Without them, the rank sends its flight recorder. Raises
    OSError, TimeoutError or ValueError.
    """
    deadline, data = time.monotonic() + timeout_s, b""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        with short_path(heartbeat.with_name(f"{heartbeat.name}{SOCKET_SUFFIX}")) as short:
            connection.connect(short)
        connection.sendall(json.dumps(wanted).encode())
        while (block := connection.recv(1 << 20)) and len(data) < MAX_REPLY_BYTES:
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
