"""Performs commands on other machines over SSH: a connection a host, kept; any number of commands on it, side by side.

It takes ``Command`` values with a host and gives ``Output`` values. What a command reads goes over its stdin, never
into its command line. A host that is lost in the middle is noticed within ``LOST_S``, also behind a jump host.
"""

import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ddpctl.command import Command, FilePart, Host, Output, process_line

if TYPE_CHECKING:
    from fabric import Connection
    from paramiko import Channel

    from ddpctl.ssh_connect import Connector

FAILED, TOOK_TOO_LONG = 255, 124
LOOK_S = 3.0  # how often a silent host is asked whether it is there
LOST_S = 8.0
_CHUNK = 1 << 16
_printing = threading.Lock()


class Remote:
    """The machines that this process talks to."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._home = Path(environ.get("HOME", "/"))
        self._connector: Connector | None = None
        self._connections: dict[Host, Connection] = {}
        self._locks: dict[Host, threading.Lock] = {}
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Import what connections need: 0.3 s that only a remote target pays, and in one thread, as imports race."""
        from ddpctl.ssh_connect import Connector

        self._connector = self._connector or Connector(self._home)

    def capture(self, command: Command) -> Output:
        """Wait for it, keep what it wrote."""
        out, err = bytearray(), bytearray()
        done = self._run(command, out.extend, err.extend)
        texts = (out.decode(errors="replace"), err.decode(errors="replace") + done.stderr)
        return Output(returncode=done.returncode, stdout=texts[0], stderr=texts[1])

    def stream(self, command: Command) -> Output:
        """Wait for it; what it writes is ours, whole lines at a time, so that many may go on side by side.

        A host that is lost is named at once: the others may go on for days.
        """
        out, err = _Lines(sys.stdout), _Lines(sys.stderr)
        done = self._run(command, out, err)
        if done.stderr:
            err(f"{command.host}: {done.stderr}\n".encode())
        out.close()
        err.close()
        return done

    def hand_over(self, command: Command) -> Output:
        """The terminal is the command's."""
        self.prepare()
        from ddpctl.ssh_connect import NoConnectionError

        try:
            done = self._connect(_host(command)).run(process_line(command), pty=True, warn=True, in_stream=sys.stdin)
        except NoConnectionError as error:
            return Output(returncode=FAILED, stderr=str(error))
        return Output(returncode=done.exited)

    def close(self) -> None:
        """Let go of all machines; what waits for one of them ends."""
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    def _run(self, command: Command, out: Callable[[bytes], None], err: Callable[[bytes], None]) -> Output:
        from paramiko.ssh_exception import SSHException

        from ddpctl.ssh_connect import NoConnectionError

        deadline = None if command.timeout_s is None else time.monotonic() + command.timeout_s
        try:
            channel = self._channel(_host(command))
        except NoConnectionError as error:
            return Output(returncode=FAILED, stderr=str(error))
        try:
            channel.settimeout(command.timeout_s)
            channel.exec_command(process_line(command))
            if command.stdin is not None:
                channel.sendall(command.stdin.encode(errors="surrogateescape"))
            if command.part is not None:
                for data in _read(command.part):
                    channel.sendall(data)
            channel.shutdown_write()
            code = _pump(channel, deadline, out, err)
        except TimeoutError:
            return Output(returncode=TOOK_TOO_LONG, stderr=f"no answer within {command.timeout_s:g} s")
        except (SSHException, OSError, EOFError) as error:
            self._forget(_host(command))
            return Output(returncode=FAILED, stderr=f"the connection was lost: {str(error) or 'the host is gone'}")
        finally:
            channel.close()
        return Output(returncode=code)

    def _channel(self, host: Host) -> "Channel":
        """A new channel; a connection that has gone stale since its last use is made anew, once."""
        from paramiko.ssh_exception import SSHException

        from ddpctl.ssh_connect import NoConnectionError

        for _ in range(2):
            try:
                return self._connect(host).transport.open_session(timeout=LOST_S)
            except (SSHException, OSError, EOFError) as error:
                why = str(error) or type(error).__name__
                self._forget(host)
        raise NoConnectionError(f"the connection was lost: {why}")

    def _connect(self, host: Host) -> "Connection":
        with self._lock:
            lock = self._locks.setdefault(host, threading.Lock())
        assert self._connector is not None, "prepare() comes first"  # noqa: S101 -- ours to keep
        with lock:
            if host not in self._connections or not self._connections[host].is_connected:
                self._connections[host] = self._connector.open(host)
            return self._connections[host]

    def _forget(self, host: Host) -> None:
        with self._lock:
            connection = self._connections.pop(host, None)
        if connection is not None:
            connection.close()


def _read(part: FilePart) -> Iterator[bytes]:
    with Path(part.path).open("rb") as file:
        file.seek(part.start)
        left = part.length
        while left and (data := file.read(min(left, _CHUNK))):
            left -= len(data)
            yield data


def _host(command: Command) -> Host:
    assert command.host is not None, "a command for this machine"  # noqa: S101 -- ours to keep
    return command.host


def _pump(
    channel: "Channel", deadline: float | None, out: Callable[[bytes], None], err: Callable[[bytes], None]
) -> int:
    """Hand on what comes until the command ends; its exit status. Raises TimeoutError, SSHException, OSError."""
    heard = time.monotonic()
    while True:
        moved = _drain(channel, out, err)
        now = time.monotonic()
        if deadline is not None and now > deadline:
            raise TimeoutError
        if moved:
            heard = now
            continue
        if channel.exit_status_ready() and (channel.eof_received or channel.closed):
            if channel.exit_status < 0:
                raise EOFError
            return int(channel.exit_status)
        if now - heard > LOOK_S:
            channel.get_transport().open_session(timeout=LOST_S - LOOK_S).close()  # raises where nobody answers
            heard = now
        select.select([channel], [], [], LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - now)))
        if channel.eof_received:
            time.sleep(0.005)  # the exit status is on its way, and select would not wait for it


def _drain(channel: "Channel", out: Callable[[bytes], None], err: Callable[[bytes], None]) -> bool:
    """Hand on what has come; whether there was anything."""
    moved = False
    for ready, receive, take in (
        (channel.recv_ready, channel.recv, out),
        (channel.recv_stderr_ready, channel.recv_stderr, err),
    ):
        while ready():
            take(receive(_CHUNK))
            moved = True
    return moved


class _Lines:
    """Writes whole lines of what it is given to a stream that others write to as well."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream.buffer
        self._rest = b""

    def __call__(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if whole:
            self._write(b"".join(line + b"\n" for line in whole))

    def close(self) -> None:
        """Write what is left without a line's end."""
        if self._rest:
            self._write(self._rest)

    def _write(self, data: bytes) -> None:
        with _printing:
            self._stream.write(data)
            self._stream.flush()
