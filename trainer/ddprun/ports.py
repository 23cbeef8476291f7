"""TCP ports of this machine: a free one, and who holds a taken one. It knows nothing of stores or nodes."""

import contextlib
import errno
import os
import random
import socket
from pathlib import Path

# Above Linux' ephemeral range, so that no outgoing connection takes one of them in between.
QUIET_PORTS = range(61000, 65536)
BACKLOG = 1024
LISTEN = "0A"  # the state in /proc/net/tcp, see proc(5)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on host:port (0: any). Raises OSError."""
    listener = bind(host, port)
    try:
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds host:port (0: any); who comes before it listens is refused. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def listen_anywhere(host: str) -> socket.socket:
    """A listening socket on a free port of ``host``. Raises OSError."""
    listener = bind_anywhere(host)
    listener.listen(BACKLOG)
    return listener


def bind_anywhere(host: str) -> socket.socket:
    """A socket that holds a free port of ``host``. Raises OSError."""
    for port in random.sample(QUIET_PORTS, 20):
        with contextlib.suppress(OSError):
            return bind(host, port)
    return bind(host, 0)


def holder(port: int) -> str:
    """Who listens on ``port``, as ' by pid 12 (python3 -m http.server)'; empty where /proc does not tell."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):
            if any(str(descriptor.readlink()) in inodes for descriptor in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f" by pid {process.name} ({command[:80]})"
    return ""


def taken(host: str, port: int, error: OSError) -> str:
    """One line for a port that could not be had."""
    if isinstance(error, socket.gaierror):
        return unresolved(host, error)
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine, which has to listen there"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"port {port} on {host} cannot be had: {reason[0].lower() + reason[1:]}{holder(port)}"


def unresolved(host: str, error: OSError) -> str:
    """One line for a name without an address."""
    return f"{host} does not resolve: {(error.strerror or str(error)).lower()}"


def free(host: str) -> int:
    """The number of a port that nobody has just now. Raises OSError."""
    with listen_anywhere(host) as listener:
        return int(listener.getsockname()[1])
