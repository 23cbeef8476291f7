"""Runs commands on other machines over SSH, with one connection per host.

The loss of a host is detected within LOST_S seconds, even behind a jump host.
"""

import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ddpctl.command import TIMED_OUT, UNREACHED, Command, Host, Output, remote_line
from ddpwire.merged_output import MergedOutput

if TYPE_CHECKING:
    from fabric import Connection
    from paramiko import Channel, Transport

    from ddpctl.execution.ssh import Connector


PROBE_S = 3.0  # how often a silent host is checked
LOST_S = 8.0
_CHUNK = 1 << 16
SESSION_S = 60.0  # how long no session may end while another one waits for its turn
_SESSION_POLL_S = 0.05


class Remote:
    """The connections of this process to other machines."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._home = Path(environ.get("HOME", "/"))
        self.keep: Callable[[bytes], bytes] = lambda data: data  # filters a command's stdout before it is printed
        self._connector: Connector | None = None
        self._connections: dict[Host, Connection] = {}
        self._locks: dict[Host, threading.Lock] = {}
        self._held: list[Channel] = []
        self._ended_at: dict[Host, float] = {}  # when the last session of a host ended
        self._lock = threading.Lock()

    def prepare(self, num_streams: int = 0) -> None:
        """Import the modules for connections, which takes 0.3 s. Call this before parallel threads open connections.

        ``num_streams`` is the number of commands that will be streamed in parallel.
        """
        from ddpctl.execution.ssh import Connector

        self._connector = self._connector or Connector(self._home)
        self._out = MergedOutput(lambda data: write_bytes(sys.stdout, self.keep(data)), num_sources=num_streams)
        self._err = MergedOutput(lambda data: write_bytes(sys.stderr, data), num_sources=num_streams)

    def openssh(self, host: Host) -> list[str]:
        """Return a command line for OpenSSH's client, with the same settings as the connections of this class."""
        assert self._connector is not None, "prepare() comes first"  # noqa: S101 -- ours to keep
        return self._connector.openssh(host)

    def capture(self, command: Command) -> Output:
        """Run a command, and return its output."""
        out, err = bytearray(), bytearray()
        done = self._run(command, out.extend, err.extend)
        texts = (out.decode(errors="replace"), err.decode(errors="replace") + done.stderr)
        return Output(returncode=done.returncode, stdout=texts[0], stderr=texts[1])

    def stream(self, command: Command) -> Output:
        """Run a command, and write its output to stdout and stderr, merged with the output of parallel commands.

        The loss of a host is printed at once, because commands on other hosts may run for days. A connection that
        ``close`` ends is not a loss.
        """
        connections = self._connections
        with closing(self._out.add_source()) as out, closing(self._err.add_source()) as err:
            done = self._run(command, out.add, err.add)
            if done.stderr and connections is self._connections:
                err.add(f"{command.host}: {done.stderr}\n".encode())
        return done

    def hold(self, command: Command) -> Output:
        """Start a command and return its first line of output. Its stdin stays open until ``release``."""

        def read_line(channel: "Channel") -> Output:
            out, err = bytearray(), bytearray()
            while b"\n" not in out and (data := channel.recv(_CHUNK)):
                out += data
            if b"\n" in out:
                self._held.append(channel)
                return Output(returncode=0, stdout=out.decode(errors="replace"))
            _drain(channel, out.extend, err.extend)
            return Output(returncode=channel.recv_exit_status() or 1, stderr=err.decode(errors="replace"))

        return self._start(command, read_line)

    def release(self) -> None:
        """Close the stdin of all held commands, so that they end."""
        while self._held:
            self._held.pop().close()

    def hand_over(self, command: Command) -> Output:
        """Run a command that uses the terminal of this process."""
        self.prepare()
        from ddpctl.execution.ssh import NoConnectionError

        try:
            done = self._connect(_host(command)).run(remote_line(command), pty=True, warn=True, in_stream=sys.stdin)
        except NoConnectionError as error:
            return Output(returncode=UNREACHED, stderr=str(error))
        return Output(returncode=done.exited)

    def close(self) -> None:
        """Close all connections. Running commands then fail."""
        with self._lock:
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    def _run(self, command: Command, out: Callable[[bytes], None], err: Callable[[bytes], None]) -> Output:
        def wait(channel: "Channel") -> Output:
            deadline = None if command.timeout_s is None else time.monotonic() + command.timeout_s
            channel.shutdown_write()
            return Output(returncode=_pump(channel, deadline, out, err))

        return self._start(command, wait)

    def _start(self, command: Command, attend: "Callable[[Channel], Output]") -> Output:
        """Start a command, send its stdin, and return the result of ``attend``. Close the channel unless it is held."""
        from paramiko.ssh_exception import SSHException

        from ddpctl.execution.ssh import NoConnectionError

        try:
            channel = self._channel(_host(command), min(SESSION_S, command.timeout_s or SESSION_S))
        except NoConnectionError as error:
            return Output(returncode=UNREACHED, stderr=str(error))
        try:
            channel.settimeout(command.timeout_s)
            channel.exec_command(remote_line(command))
            data = (command.stdin or "").encode(errors="surrogateescape")
            for start in range(0, len(data), _CHUNK):  # in chunks, because sendall copies the rest for each packet
                channel.sendall(data[start : start + _CHUNK])
            return attend(channel)
        except TimeoutError:
            return Output(returncode=TIMED_OUT, stderr=f"no answer within {command.timeout_s:g} s")
        except (SSHException, OSError, EOFError) as error:
            self._forget(_host(command))
            return Output(returncode=UNREACHED, stderr=f"the connection was lost ({str(error) or 'the host is gone'})")
        finally:
            if channel not in self._held:
                channel.close()
                self._ended_at[_host(command)] = time.monotonic()

    def _channel(self, host: Host, timeout_s: float) -> "Channel":
        """Open a session. If the existing connection is broken, connect again once.

        If the sshd refuses the session, wait for the end of another one: by default, it allows 10 (MaxSessions). Give
        up if none has ended for ``timeout_s``.
        """
        from paramiko.ssh_exception import SSHException

        from ddpctl.execution.ssh import NoConnectionError

        connections, started, is_new, pause_s = self._connections, time.monotonic(), False, _SESSION_POLL_S
        while connections is self._connections:  # otherwise they were closed
            try:
                if channel := _open_session(self._connect(host).transport, LOST_S):
                    return channel
                if time.monotonic() - max(started, self._ended_at.get(host, 0.0)) > timeout_s:
                    raise NoConnectionError(f"its sshd has allowed no further session for {timeout_s:g} s")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)  # each refusal is a line in the log of the sshd
            except (SSHException, OSError, EOFError) as error:
                self._forget(host)
                if is_new:
                    raise NoConnectionError(f"the connection was lost ({str(error) or type(error).__name__})") from None
                is_new = True
        raise NoConnectionError("the connection was closed")

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


def _host(command: Command) -> Host:
    assert command.host is not None, "a command for this machine"  # noqa: S101 -- ours to keep
    return command.host


def _open_session(transport: "Transport", timeout_s: float) -> "Channel | None":
    """Open a session. Return None if the sshd refuses it. Raises SSHException, OSError and EOFError."""
    from paramiko.ssh_exception import SSHException

    began = time.monotonic()
    try:
        return transport.open_session(timeout=timeout_s)
    except SSHException:  # its type does not matter: paramiko mixes up the errors of parallel requests
        if transport.is_active() and time.monotonic() - began < timeout_s:
            return None
        raise


def _pump(
    channel: "Channel", deadline: float | None, out: Callable[[bytes], None], err: Callable[[bytes], None]
) -> int:
    """Pass the output to ``out`` and ``err`` until the command ends. Return its exit code.

    Raises TimeoutError, SSHException, OSError and EOFError.
    """
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
        if now - heard > PROBE_S:  # the next line raises an error if the host does not answer
            if session := _open_session(channel.get_transport(), LOST_S - PROBE_S):
                session.close()
            heard = now
        select.select([channel], [], [], PROBE_S if deadline is None else min(PROBE_S, max(0.0, deadline - now)))
        if channel.eof_received:
            time.sleep(0.005)  # the exit status follows, and select does not wait for it


def _drain(channel: "Channel", out: Callable[[bytes], None], err: Callable[[bytes], None]) -> bool:
    moved = False
    while channel.recv_ready():
        out(channel.recv(_CHUNK))
        moved = True
    while channel.recv_stderr_ready():
        err(channel.recv_stderr(_CHUNK))
        moved = True
    return moved


def write_bytes(stream: TextIO, data: bytes) -> None:
    """Write to stdout or stderr without buffering."""
    if data:
        stream.buffer.write(data)
        stream.buffer.flush()
