"""Names, addresses, interfaces and TCP ports of this machine, and the messages for network errors.

Every request has a timeout, so that a silent name server cannot block the caller.
"""

import contextlib
import errno
import ipaddress
import os
import random
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpwire.machine import resolve as resolve
from ddpwire.machine import source_address as source_address

CONNECT_TIMEOUT_S = 4.0  # longer than ARP takes to find nobody (3 s)
ARP_TABLE = Path("/proc/net/arp")
DOCUMENTATION_ADDRESS = "198.51.100.1"  # belongs to no machine (RFC 5737), so the default route leads there

# What each error of a failed connection means. Linux distinguishes these.
ERROR_MEANINGS = {
    errno.ECONNREFUSED: "refused the connection: nothing listens there yet, or a firewall resets it",
    errno.ECONNRESET: "accepted the connection and reset it: a proxy or a firewall may be in between",
    errno.ETIMEDOUT: "does not answer: a firewall drops packets, or the address is on another network",
    errno.EHOSTUNREACH: "cannot be reached: that machine or its link is down, or a router rejects the connection",
    errno.ENETUNREACH: "cannot be reached: no route leads there from this machine",
    errno.EADDRNOTAVAIL: "cannot be reached: this machine has no address for a connection to it",
    errno.EACCES: "cannot be reached: a rule of this machine forbids it",
    errno.EPERM: "cannot be reached: a firewall of this machine forbids it",
}
# Above Linux's ephemeral range, so that no outgoing connection takes one of these ports meanwhile.
FREE_PORT_RANGE = range(61000, 65536)
LISTEN_BACKLOG = 1024


def interface_of(address: str) -> str | None:
    """Return the name of the interface with ``address``, or None if this machine does not have that address."""
    import psutil  # lazily: nodectl imports this module and must start quickly

    for name, owned in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in owned):
            return name.partition(":")[0]  # eth0:1 is an alias of eth0
    return None


def local_addresses() -> str:
    """Return the addresses of this machine in one text, such as '10.0.0.3 (eth0) and 192.168.1.5 (wlan0)'."""
    import psutil  # lazily: nodectl imports this module and must start quickly

    entries = ((name, entry) for name, owned in psutil.net_if_addrs().items() for entry in owned)
    internet = ((name, entry.address) for name, entry in entries if entry.family == socket.AF_INET)
    own = [f"{address} ({name})" for name, address in internet if not ipaddress.ip_address(address).is_loopback]
    return " and ".join(own[:4]) or "none but the loopback"


def check_reachable(address: str, port: int, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Check that a process listens on the port, by connecting to it. Raises OSError."""
    timeout_s = max(0.2, min(CONNECT_TIMEOUT_S, timeout_s))
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
    except TimeoutError:
        if _is_unanswered(address):  # the kernel would report this after 3 s
            raise OSError(errno.EHOSTUNREACH, "no route to host") from None
        raise


def _is_unanswered(address: str) -> bool:
    """Return whether ``address`` is on the local network and does not answer ARP requests."""
    with contextlib.suppress(OSError):  # this is not Linux
        rows = [line.split() for line in ARP_TABLE.read_text().splitlines()]
        return any(row[0] == address and row[2] == "0x0" for row in rows)  # the flags of no answer, see proc(5)
    return False


def describe_error(error: OSError, address: str, port: int | None = None) -> str:
    """Describe ``error``, raised while connecting to ``address``, in one sentence."""
    where = address if port is None else f"{address}:{port}"
    number = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno
    meaning = ERROR_MEANINGS.get(number or 0) or f"cannot be reached: {(error.strerror or str(error)).lower()}"
    if number == errno.ECONNREFUSED and ipaddress.ip_address(address).is_loopback:
        meaning = "refused the connection: nothing listens on this port of the local machine yet"
    return f"{where} {meaning}"


def bind(host: str, port: int, *, listen: bool = False, share: bool = True) -> socket.socket:
    """Return a socket that is bound to host:port, and listens if ``listen`` is set. Raises OSError.

    If ``share`` is False, no other process can bind the port, even before the socket listens (man 7 socket,
    SO_REUSEADDR). In this case, a port is not free until the kernel has forgotten its old connections.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, share)
        listener.bind(address)
        if listen:
            listener.listen(LISTEN_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def lock_port(host: str, port: int) -> bool:
    """Lock host:port for this process until it ends. Return False if another process has the port. Raises OSError.

    Linux lets several sockets bind a port before one of them listens. So the lock is an abstract Unix socket, whose
    name only one process can bind.
    """
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        if sys.platform == "linux":
            lock.bind(f"\0ddprun {host} {port}")  # a name that is in no file system
        bind(host, port).close()
    except OSError as error:
        lock.close()
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    lock.detach()
    return True


def serve_http(host: str, port: int, answer: Callable[[Any], None], *, name: str, timeout_s: float) -> int:
    """Answer GET requests on ``port`` or, if the port is taken, on a free one. Return the port. Raises OSError.

    ``answer`` is called with a BaseHTTPRequestHandler. A client that neither sends nor reads is disconnected after
    ``timeout_s``.
    """
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # lazily, as psutil

    class Handler(BaseHTTPRequestHandler):
        timeout = timeout_s

        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            pass  # the client has disconnected

    try:
        listener = bind(host, port, listen=True)
    except OSError:
        listener = bind(host, 0, listen=True)
    server = Server(listener.getsockname(), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    threading.Thread(target=server.serve_forever, name=name, daemon=True).start()
    return int(listener.getsockname()[1])


def bind_free_port(host: str) -> socket.socket:
    """Return a socket bound to a free port of ``host``, which no other process can bind. Raises OSError."""
    for port in random.sample(FREE_PORT_RANGE, 20):
        with contextlib.suppress(OSError):
            return bind(host, port, share=False)
    return bind(host, 0, share=False)


def port_holder(port: int) -> str:
    """Return a text such as ' by pid 12 (python3 train.py)' for the process that listens on ``port``, or ''."""
    import psutil  # lazily: nodectl imports this module and must start quickly

    with contextlib.suppress(OSError, psutil.Error):
        for entry in psutil.net_connections("tcp"):
            if entry.pid and entry.status == psutil.CONN_LISTEN and entry.laddr and entry.laddr.port == port:
                return f" by pid {entry.pid} ({' '.join(psutil.Process(entry.pid).cmdline())[:80]})"
    return ""


def describe_taken_port(host: str, port: int, error: OSError) -> str:
    """Describe in one line why ``port`` of ``host`` could not be bound."""
    if isinstance(error, socket.gaierror):
        return describe_unresolved(host, error)
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine, but node 0 must listen on it"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"port {port} on {host} is not available: {reason[0].lower() + reason[1:]}{port_holder(port)}"


def describe_unresolved(host: str, error: OSError) -> str:
    """Describe in one line why a name could not be resolved."""
    return f"'{host}' does not resolve: {(error.strerror or str(error)).lower()}"


def free_port(host: str) -> int:
    """Return the number of a port that is free at the moment. Raises OSError."""
    with bind_free_port(host) as listener:
        return int(listener.getsockname()[1])
