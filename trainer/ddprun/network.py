"""The way from this machine to another: name, address, interface, and a sentence for what is in between.

It knows nothing of runs. Every question has a time-out: a name server that is silent keeps nobody.
"""

import contextlib
import errno
import ipaddress
import socket
import threading
from pathlib import Path

import psutil

REACH_S = 4.0  # longer than ARP takes to find nobody (3 s)
LEAST_S = 0.2
NEIGHBOURS = Path("/proc/net/arp")
NOBODY = "0x0"  # the flags of an address that was asked for and has not answered, see proc(5)

# What a failed connection means, as a person asks it. Linux tells these apart.
MEANINGS = {
    errno.ECONNREFUSED: "refused the connection: nothing listens there yet, or a firewall resets it",
    errno.ECONNRESET: "took the connection and reset it: a proxy, or a firewall, is in between",
    errno.ETIMEDOUT: "does not answer: a firewall drops what is sent, or the address is another network's",
    errno.EHOSTUNREACH: "cannot be reached: that machine is down, its link is, or a router sends it back",
    errno.ENETUNREACH: "cannot be reached: no route leads there from this machine",
    errno.EADDRNOTAVAIL: "cannot be reached: no address of this machine fits it",
    errno.EACCES: "cannot be reached: a rule of this machine forbids it",
    errno.EPERM: "cannot be reached: a firewall of this machine forbids it",
}


def resolve(host: str, *, timeout_s: float) -> str:
    """The address of ``host``. Raises OSError; a name server that does not answer in time is a TimeoutError."""
    answers: list[str | OSError] = []

    def ask() -> None:
        try:
            answers.append(str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]))
        except OSError as error:
            answers.append(error)
        except UnicodeError:  # a label that is empty or too long
            answers.append(socket.gaierror(socket.EAI_NONAME, "not a name of a host"))

    asking = threading.Thread(target=ask, name="resolver", daemon=True)
    asking.start()
    asking.join(timeout_s)
    if not answers:
        raise TimeoutError(errno.ETIMEDOUT, "the name server does not answer")
    if isinstance(answers[0], OSError):
        raise answers[0]
    return answers[0]


def source_address(address: str) -> str:
    """The address of this machine from which ``address`` is reached. Raises OSError where no route leads there."""
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: it only looks up the route
        return str(probe.getsockname()[0])


def interface(address: str) -> str | None:
    """The interface that owns ``address``; None: no address of this machine, or of none that is named."""
    for name, owned in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in owned):
            return name.partition(":")[0]  # eth0:1 is an alias of eth0
    return None


def addresses() -> str:
    """The addresses of this machine, as '10.0.0.3 (eth0) and 192.168.1.5 (wlan0)'."""
    own = [
        f"{one.address} ({name})"
        for name, owned in psutil.net_if_addrs().items()
        for one in owned
        if one.family == socket.AF_INET and not ipaddress.ip_address(one.address).is_loopback
    ]
    return " and ".join(own[:4]) or "none but the loopback"


def reach(address: str, port: int, *, timeout_s: float = REACH_S) -> None:
    """Whether somebody listens there. Raises OSError."""
    try:
        socket.create_connection((address, port), timeout=max(LEAST_S, min(REACH_S, timeout_s))).close()
    except TimeoutError:
        if _is_nobody(address):  # the kernel would say so after 3 s
            raise OSError(errno.EHOSTUNREACH, "no route to host") from None
        raise


def _is_nobody(address: str) -> bool:
    """Whether this machine asks its own network for ``address``, and nobody answers."""
    with contextlib.suppress(OSError):  # another system than Linux
        rows = [line.split() for line in NEIGHBOURS.read_text().splitlines()]
        return any(row[0] == address and row[2] == NOBODY for row in rows)
    return False


def why(error: OSError, address: str, port: int | None = None) -> str:
    """What ``error`` says of the way to ``address``, in a sentence."""
    where = address if port is None else f"{address}:{port}"
    number = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno
    meaning = MEANINGS.get(number or 0) or f"cannot be reached: {(error.strerror or str(error)).lower()}"
    if number == errno.ECONNREFUSED and ipaddress.ip_address(address).is_loopback:
        meaning = "refused the connection: nothing listens there yet, and it is this machine itself"
    return f"{where} {meaning}"
