"""Checks between the nodes: TCP to an ephemeral port, the path MTU and the host names.

``blame`` decides which node is at fault if a check fails between two nodes.

Each node opens a TCP and a UDP port, and tries the ports of all other nodes. So each pair of nodes is tried in both
directions.
"""

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median

from ddpcheck.finding import Finding, Status
from ddpwire.clock import MAX_OFFSET_S
from ddpwire.machine import resolve

Pair = tuple[int, int]  # from, to
CONNECT_S, CONNECT_TRIES = 3.0, 2  # a lost packet is sent again after 1 s
NAME_S = 5.0  # the C library's own time-out of a name server, resolv.conf(5)
UDP_ANSWER_S, UDP_TRIES = 0.4, 5  # a healthy network may lose datagrams
IP_HEADERS = 28  # of IPv4 and UDP
MIN_MTU, MOST_UDP = 576, 65507 + IP_HEADERS
# The MTUs of common links and tunnels.
MTUS = (8950, 4470, 1492, 1480, 1462, 1450, 1440, 1420, 1400, 1380, 1340, 1280, 1000, 800)
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE, IP_MTU = 10, 3, 14  # linux/in.h; Python has no names for them
BAD_CLOCK_S = 30.0  # NTP does not run: clocks drift by about a second per day
MOST_THREADS = 32


@dataclass(frozen=True, kw_only=True)
class Node:
    """What a node tells the others about itself, before the checks."""

    node: int
    host: str
    address: str
    tcp: int
    udp: int
    mtu: int  # MTU of the interface that has the address; 0: unknown
    machine: str  # the same for nodes that share a kernel


@dataclass(frozen=True, kw_only=True)
class Paths:
    """What a node has found about the paths to the other nodes. The keys of each field are the other nodes."""

    closed: dict[int, str] = field(default_factory=dict)  # why the TCP port of the other node cannot be reached
    mtu: dict[int, int] = field(default_factory=dict)  # the size of the largest packet that arrives
    announced: dict[int, bool] = field(default_factory=dict)  # whether a router has announced the lower MTU
    names: dict[int, str] = field(default_factory=dict)  # the address of the other node's host name; empty: unknown
    nameless: dict[int, str] = field(default_factory=dict)  # why the other node's host name is unknown


def open_ports(address: str) -> tuple[socket.socket, socket.socket]:
    """Listen on a TCP and a UDP port that the kernel chooses. A thread answers each datagram with its length."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    tcp, udp = socket.socket(family, socket.SOCK_STREAM), socket.socket(family, socket.SOCK_DGRAM)
    tcp.bind((address, 0))
    tcp.listen(1024)  # the kernel completes each connection, so no accept is necessary
    udp.bind((address, 0))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                data, sender = udp.recvfrom(1 << 16)
                udp.sendto(str(len(data)).encode(), sender)

    threading.Thread(target=answer, daemon=True).start()
    return tcp, udp


def try_paths(me: Node, nodes: Sequence[Node]) -> Paths:
    """Try the paths to all other nodes in parallel. If all ports are closed, the time-outs take about 10 s."""
    paths = Paths()
    others = [node for node in nodes if node.node != me.node]

    def look(peer: Node) -> None:
        if reason := _why_closed(peer):
            paths.closed[peer.node] = reason
        if peer.address != me.address and me.mtu and peer.mtu and ":" not in peer.address:
            mtu, announced = _path_mtu(peer, min(me.mtu, peer.mtu, MOST_UDP))
            if mtu:
                paths.mtu[peer.node], paths.announced[peer.node] = mtu, announced

    def name(peer: Node) -> None:
        try:
            paths.names[peer.node] = resolve(peer.host, timeout_s=NAME_S)
        except OSError as error:
            paths.names[peer.node], paths.nameless[peer.node] = "", error.strerror or str(error)

    with ThreadPoolExecutor(MOST_THREADS) as pool:
        for waiting in [*(pool.submit(look, peer) for peer in others), *(pool.submit(name, node) for node in nodes)]:
            waiting.result()
    return paths


def _why_closed(peer: Node) -> str:
    reason = ""
    for _ in range(CONNECT_TRIES):
        try:
            socket.create_connection((peer.address, peer.tcp), timeout=CONNECT_S).close()
            return ""
        except TimeoutError:
            reason = f"no answer within {CONNECT_S:g} s"
        except OSError as error:
            reason = error.strerror or str(error)
    return reason


def _path_mtu(peer: Node, most: int) -> tuple[int, bool]:
    """Return the largest packet size that was answered, or 0, and whether a router announced a lower MTU.

    The size ``most`` is tried again at the end, because a healthy network may lose datagrams, too.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
        probe.settimeout(UDP_ANSWER_S)
        probe.connect((peer.address, peer.udp))
        if _arrives(probe, most):
            return most, False
        if not _arrives(probe, MIN_MTU):
            return 0, False
        sizes = _sizes(most)
        low, high = 0, len(sizes) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _arrives(probe, sizes[middle]) else (low, middle)
        if _arrives(probe, most):
            return most, False
        return sizes[low], probe.getsockopt(socket.IPPROTO_IP, IP_MTU) < most


def _sizes(most: int) -> list[int]:
    """Return the packet sizes that may be tried, in ascending order."""
    return [MIN_MTU, *sorted(size for size in MTUS if size < most), most]


def _arrives(probe: socket.socket, size: int) -> bool:
    payload = bytes(size - IP_HEADERS)
    for _ in range(UDP_TRIES):
        with contextlib.suppress(OSError):  # no answer, or a router's error for an earlier datagram
            probe.send(payload)
            while int(probe.recv(16)) != len(payload):
                pass
            return True
    return False


def blame(failed: Collection[Pair], nodes: Collection[int]) -> dict[int, list[Pair]]:
    """Return the failed pairs of each node at fault. The aim is to blame few nodes.

    If there are more than two nodes, each node that no other node can reach is blamed. Then, as long as failed pairs
    remain, the node that occurs in the largest number of them is blamed. If several nodes occur in equally many pairs,
    a node that others cannot reach is blamed first.
    """
    alone = {node for node in nodes if len(nodes) > 2 and sum(to == node for _, to in failed) == len(nodes) - 1}
    blamed = {node: sorted(pair for pair in failed if pair[1] == node) for node in sorted(alone)}
    remaining = {pair for pair in failed if alone.isdisjoint(pair)}
    while remaining:
        counts, receivers = Counter(node for pair in remaining for node in pair), {to for _, to in remaining}
        worst = max(sorted(counts), key=lambda node: (counts[node], node in receivers))
        blamed[worst] = sorted(pair for pair in remaining if worst in pair)
        remaining -= set(blamed[worst])
    return blamed


def judge(nodes: Sequence[Node], paths: Mapping[int, Paths]) -> Iterator[Finding]:
    """Yield one finding per node and check. ``paths``: what each node has found about its paths."""
    if len({(node.machine, node.address) for node in nodes}) == 1:
        for node in nodes:
            yield from (Finding(check, "ok", "one machine", node.node) for check in ("ports", "path MTU", "names"))
        return
    for node in nodes:
        if node.node in paths:
            yield _judge_names(node, nodes, paths)
    closed = {(node, to): reason for node, own in paths.items() for to, reason in own.closed.items()}
    for node, pairs in _by_node(closed, nodes):
        inward, outward = [a for a, b in pairs if b == node.node], [b for a, b in pairs if a == node.node]
        failures = [f"{_list(inward)} cannot connect to its port {node.tcp}"] if inward else []
        failures += [f"it cannot connect to {_list(outward)}"] if outward else []
        value = f"{'; '.join(failures)} ({closed[pairs[0]]})" if pairs else "open to all the others"
        yield Finding("ports", "bad" if pairs else "ok", value, node.node)
    of = {node.node: node for node in nodes}
    sizes = {(node, to): mtu for node, own in paths.items() for to, mtu in own.mtu.items()}
    most = {pair: min(of[pair[0]].mtu, of[pair[1]].mtu, MOST_UDP) for pair in sizes}
    small = {pair: mtu for pair, mtu in sizes.items() if mtu < most[pair]}
    usual = Counter(node.mtu for node in nodes).most_common(1)[0][0]
    for node, pairs in _by_node(small, nodes):
        silent = [to for to in of if to != node.node and (node.node, to) not in sizes]
        unknown = f"; not looked at toward {_list(silent)}: no datagram is answered" if silent else ""
        if pairs:
            announced = all(paths[a].announced.get(b) for a, b in pairs)  # TCP adapts
            others = sorted({node for pair in pairs for node in pair} - {node.node})
            passes = min(small[pair] for pair in pairs)
            fails = max(next(size for size in _sizes(most[pair]) if size > small[pair]) for pair in pairs)
            value = f"packets of {fails} bytes do not pass between it and {_list(others)}, those of {passes} bytes do"
            value += unknown
            yield Finding("path MTU", "warning" if announced else "bad", value, node.node)
        elif len(silent) == len(nodes) - 1:
            yield Finding("path MTU", "not looked at", "no datagram is answered", node.node)
        else:
            differs = f", {usual} elsewhere" if node.mtu != usual else ""
            yield Finding("path MTU", "warning" if differs else "ok", f"{node.mtu}{differs}{unknown}", node.node)


def _by_node(failed: Collection[Pair], nodes: Sequence[Node]) -> list[tuple[Node, list[Pair]]]:
    blamed = blame(failed, [node.node for node in nodes])
    return [(node, blamed.get(node.node, [])) for node in nodes]


def _judge_names(node: Node, nodes: Sequence[Node], paths: Mapping[int, Paths]) -> Finding:
    """Check the host names. Bad: a name of another node, and not of this node, resolves to the loopback.

    Warning: the node's own name resolves to the loopback (usual on Debian, and harmless), or the node does not know a
    name that another node knows.
    """
    hosts = {node.node: node.host for node in nodes}
    addresses = {to: address for to, address in paths[node.node].names.items() if address}
    looped = {to: address for to, address in addresses.items() if address == "::1" or address.startswith("127.")}
    wrong = any(hosts[to] != node.host for to in looped)
    missing = sorted(
        {to for other in paths.values() for to, address in other.names.items() if address} - set(addresses)
    )
    problems = [f"{hosts[to]} (node {to}) is {address} here" for to, address in looped.items()]
    reasons = dict.fromkeys(paths[node.node].nameless.get(to, "unknown") for to in missing)
    problems += [f"it cannot resolve the name of {_list(missing)} ({', '.join(reasons)})"] if missing else []
    value = "; ".join(problems) or ("as everywhere" if addresses else "no name is known anywhere; addresses are used")
    return Finding("names", "bad" if wrong else "warning" if problems else "ok", value, node.node)


def judge_clocks(offsets: Mapping[int, float]) -> Iterator[Finding]:
    """Compare each clock with the median of all clocks, or with node 0's clock if there are only two nodes."""
    middle = median(offsets.values()) if len(offsets) > 2 else 0.0
    for node, offset in offsets.items():
        apart = abs(offset - middle)
        status: Status = "bad" if apart > BAD_CLOCK_S else "warning" if apart > MAX_OFFSET_S else "ok"
        unsure = " (of two clocks it is not known which is wrong)" if status != "ok" and len(offsets) == 2 else ""
        yield Finding("clock", status, f"{apart:.3f} s {'ahead' if offset > middle else 'behind'}{unsure}", node)


def _list(nodes: Sequence[int]) -> str:
    return f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"
