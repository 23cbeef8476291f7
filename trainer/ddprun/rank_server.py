"""What a forked rank tells of itself while it hangs: the stacks of its Python threads, and torch's flight recorder.

The stacks are written by faulthandler from a signal handler in C, also while a thread holds the GIL and before there is
a process group, into a memory file that ddprun finds among the process's descriptors. A process without this file, such
as a program that the rank executes, gets no signal. Processes that the rank forks (workers of a DataLoader) have it.

The flight recorder is read by a thread, which answers on a Unix socket beside the rank's heartbeat. It starts with the
first process group, which has threads of its own. It is not one of ``threading``'s, so that scripts do not see it.
"""

import _thread
import contextlib
import faulthandler
import fcntl
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ddprun import compat
from ddpwire.heartbeat import HEARTBEAT_FILE

STACKS = "ddprun-stacks"  # the name of the memory file
STACKS_SIGNAL = getattr(signal, "SIGRTMAX", 64) - 6
FIRST_DESCRIPTOR = 200  # a script gets the same low numbers as without the memory file
SOCKET_SUFFIX = ".sock"
SEND_TIMEOUT_S = 5.0


def offer_stacks(env: Mapping[str, str]) -> None:
    """Let faulthandler write the stacks of this process, and of those it forks, into a memory file on a signal."""
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


def serve_flight_recorder(heartbeat: Path) -> None:
    """Answer each connection with the flight recorder's JSON, from a thread. Without a socket it stays unknown."""
    with contextlib.suppress(OSError):
        listener = socket.socket(socket.AF_UNIX)
        with short_path(heartbeat.with_name(f"{heartbeat.name}{SOCKET_SUFFIX}")) as path:
            os.fchmod(listener.fileno(), 0o600)  # of the file that bind makes
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
        with connection, contextlib.suppress(Exception):
            connection.settimeout(SEND_TIMEOUT_S)
            connection.sendall(compat.flight_recorder())


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Give a path that fits into a socket's address, 108 bytes, while it is used."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
