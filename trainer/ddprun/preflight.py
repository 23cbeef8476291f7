"""The preflight: what can be known to be wrong before the ranks start, said in a sentence, by node.

``find_way`` goes as far as this machine alone can, before torch is imported; ``Checks`` is what happens where the nodes
meet. Absent is not wrong: who merely has not come is waited for, in the rendezvous.
"""

import errno
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from ddprun import health, machine, network, ports
from ddprun.contract import Contract
from ddprun.errors import bad_contract, refused
from ddprun.report import Report
from ddpwire import names
from ddpwire.exits import Exit

PATIENCE_S = 3.0  # a name, or a network, that is not there for so long is wrong
POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Way:
    """How this node and node 0 reach each other."""

    address: str  # node 0's
    own: str  # this node's, as node 0 sees it
    interface: str | None  # None: the address is none of this machine's interfaces'
    listener: socket.socket | None  # on node 0: holds the port, and does not listen yet


def find_way(contract: Contract, report: Report) -> Way:
    """The name, the address and interface, and on node 0 the port. Raises NodeError."""
    report.begin("resolve")
    address = _resolve(contract)
    if machine.is_loopback(address) and not contract.on_one_machine and contract.max_nodes > contract.nodes_here:
        raise bad_contract(_trap(contract.master_addr, address))
    report.done(f"{contract.master_addr} is {address}" if address != contract.master_addr else address)
    report.begin("address")
    own = contract.local_addr or _patiently(
        contract,
        lambda _: network.source_address(address),
        lambda error: f"{who(contract.node_rank)}: {network.why(error, address)}; it has {network.addresses()}",
    )
    interface = network.interface(own)
    if interface is None and contract.local_addr:
        raise bad_contract(f"--local-addr is {own}, but this machine has {network.addresses()}")
    report.done(f"{own} on {interface}")
    if contract.node_rank:
        return Way(address=address, own=own, interface=interface, listener=None)
    report.begin("port")
    listener = _hold(contract, address)
    report.done(f"{listener.getsockname()[1]} on {address} is ours")
    return Way(address=address, own=own, interface=interface, listener=listener)


def who(node: int, own: str | None = None) -> str:
    """A node as sentences name it."""
    return f"node-{node} ({own})" if own else f"node-{node}"


def _resolve(contract: Contract) -> str:
    host = contract.master_addr
    return _patiently(
        contract,
        lambda left_s: network.resolve(host, timeout_s=min(PATIENCE_S, left_s)),
        lambda error: f"{who(contract.node_rank)}: {ports.unresolved(host, error)}",
    )


def _patiently(contract: Contract, ask: Callable[[float], str], why: Callable[[OSError], str]) -> str:
    """The answer; what is wrong at first may be right in a moment, and in Kubernetes once a pod is ready.

    ``ask`` is told how many seconds it has.
    """
    deadline = time.monotonic() + (contract.join_timeout_s if contract.patient else PATIENCE_S)
    while True:
        try:
            return ask(deadline - time.monotonic())
        except OSError as error:
            if time.monotonic() + POLL_S >= deadline:
                raise refused(Exit.UNAVAILABLE, "unavailable", why(error), node=contract.node_rank) from None
        time.sleep(POLL_S)


def _trap(host: str, address: str) -> str:
    here = f"here {host} is {address}, which other machines cannot reach"
    if address == "127.0.1.1":
        here += f" (Debian's line '127.0.1.1 {host}' in /etc/hosts)"
    return f"{here}: give node 0's address on the network as --master-addr; this machine has {network.addresses()}"


def _hold(contract: Contract, address: str) -> socket.socket:
    """Node 0's port, so that nothing can take it any more; any, where nobody else must know it."""
    port = contract.master_port
    try:
        return ports.bind(address, port) if port else ports.bind_anywhere(address)
    except OSError as error:
        message = ports.taken(address, port, error)
        if error.errno == errno.EADDRNOTAVAIL:
            message += f"; it has {network.addresses()}"
        raise refused(Exit.UNAVAILABLE, "unavailable", message, node=0) from None


def check_limits(contract: Contract, report: Report) -> None:
    """A warning for each limit of this machine that is likely to hurt."""
    report.begin("limits")
    device = os.environ.get(names.DEVICE, "")
    found = health.warnings(
        health.read(0 if device == "cpu" else machine.gpus()),
        nproc=contract.nproc,
        num_nodes=contract.max_nodes,
        device=device,
    )
    for line in found:
        report.warn(line)
    report.done("; ".join(found) or "nothing that would hurt", "warning" if found else "ok")
