"""The preflight finds problems before the ranks start, and reports each in one sentence that names its node.

``find_route`` checks this machine alone, before torch is imported. peer_checks.py compares the nodes when they meet. An
absent node is not a problem in the preflight, because the rendezvous waits for it.
"""

import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ddprun.files.node_dir import Node
from ddprun.metrics.recovery import Downtime
from ddprun.ranks.rank_environment import ResourceAllocation
from ddprun.ranks.termination import Signals
from ddprun.ranks.user_commands import UserCommands
from ddprun.ranks.workers import Workers
from ddprun.settings.node_config import UNNUMBERED, NodeConfig
from ddprun.system import machine, network
from ddprun.system.errors import config_error, node_error
from ddpwire import names
from ddpwire.exits import Exit

StepResult = Literal["ok", "warning", "failed"]
SLOW_STEP_S = 1.0  # a step that takes longer is logged
RETRY_S = 3.0  # how long a name or a route may be missing
POLL_S = 0.2  # between two requests to the name server
OLD_NAME_S = 60.0  # how long node 0's name may still have the address of the previous node 0


@dataclass(frozen=True, kw_only=True)
class PreflightStep:
    """A step of the preflight that is finished."""

    name: str  # one of ddpwire.metrics.PREFLIGHT_STEPS
    result: StepResult
    detail: str
    seconds: float


class PreflightReport:
    """The steps of one node's preflight: log lines, a table, and durations for the metrics."""

    def __init__(self, log: Callable[[str], None], *, quiet: bool) -> None:
        """If ``quiet`` is set, only problems are logged."""
        self._log = log
        self._quiet = quiet
        self._since = time.monotonic()
        self._name = ""
        self.steps: list[PreflightStep] = []

    def begin(self, name: str) -> None:
        """Begin the step ``name``."""
        self._name, self._since = name, time.monotonic()

    def done(self, detail: str, result: StepResult = "ok") -> None:
        """End the current step."""
        step = PreflightStep(name=self._name, result=result, detail=detail, seconds=time.monotonic() - self._since)
        self.steps.append(step)
        self._name = ""
        if step.seconds > SLOW_STEP_S and result == "ok" and not self._quiet:
            self._log(f"{step.name}: {detail} (after {step.seconds:.1f} s)")

    def warn(self, line: str) -> None:
        """Log a problem that does not stop the run."""
        self._log(f"warning: {line}")

    def failed(self, problem: str) -> None:
        """End the current step, if any, as failed."""
        if self._name:
            self.done(problem, "failed")

    def sum_up(self) -> None:
        """Log one line that summarizes a successful preflight, unless ``quiet``."""
        if not self._quiet:
            results = {step.name: step.detail for step in self.steps}
            summary = "; ".join(results[name] for name in ("address", "meet", "compare") if name in results)
            self._log(f"preflight: {summary} ({sum(step.seconds for step in self.steps):.1f} s)")

    def table(self) -> str:
        """Return the steps as an aligned table."""
        rows = [("step", "result", "what"), *((step.name, step.result, step.detail) for step in self.steps)]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "".join(f"{name:{widths[0]}}  {result:{widths[1]}}  {detail}\n" for name, result, detail in rows)


@dataclass(frozen=True, kw_only=True)
class Route:
    """The addresses by which this node and node 0 reach each other."""

    address: str  # node 0's address
    own: str  # this node's address, as node 0 sees it
    interface: str | None  # None if no interface of this machine has that address
    listener: socket.socket | None  # on node 0, a socket that is bound to the port but does not listen yet


@dataclass(frozen=True, kw_only=True)
class StartedNode(Node):
    """A node that has forked its supervisor, and knows its route to node 0."""

    environ: Mapping[str, str]  # ddprun's own environment; each rank's environment is derived from it
    commands: UserCommands
    signals: Signals
    workers: Workers
    resources: ResourceAllocation
    report: PreflightReport
    route: Route
    downtime: Downtime


def find_route(config: NodeConfig, report: PreflightReport) -> Route:
    """Return the addresses of node 0 and of this node. On node 0, bind its port. Raises NodeError."""
    report.begin("resolve")
    address = _resolve(config)
    if machine.is_loopback(address) and not config.on_one_machine and config.max_nodes > config.nodes_here:
        raise config_error(_loopback_message(config.master_addr, address))
    report.done(f"{config.master_addr} is {address}" if address != config.master_addr else address)
    report.begin("address")
    label = node_label(config.node_rank)
    own = config.local_addr or _retry(
        config,
        lambda _: network.source_address(address),
        lambda error: (
            f"{label}: {network.describe_error(error, address)}; this machine has {network.local_addresses()}"
        ),
    )
    interface = network.interface_of(own)
    if interface is None and config.local_addr:
        raise config_error(f"--local-addr is {own}, but the addresses of this machine are {network.local_addresses()}")
    report.done(f"{own} on {interface}")
    listener = None
    if config.node_rank == 0:
        report.begin("port")
        listener = _reserve_port(config, address)
        report.done(f"{listener.getsockname()[1]} on {address} is free")
    return Route(address=address, own=own, interface=interface, listener=listener)


def node_label(node: int) -> str:
    """Return the name of a node for messages."""
    return "this node" if node == UNNUMBERED else f"node-{node}"


def _resolve(config: NodeConfig) -> str:
    host, began = config.master_addr, time.monotonic()

    def ask(left_s: float) -> str:
        address = network.resolve(host, timeout_s=min(RETRY_S, left_s))
        may_be_old = config.is_replaced and not config.node_rank and time.monotonic() < began + OLD_NAME_S
        if may_be_old and network.interface_of(address) is None:
            raise OSError(errno.EADDRNOTAVAIL, f"{address} is not an address of this machine")
        return address

    return _retry(config, ask, lambda e: f"{node_label(config.node_rank)}: {network.describe_unresolved(host, e)}")


def _retry(config: NodeConfig, ask: Callable[[float], str], describe: Callable[[OSError], str]) -> str:
    """Call ``ask`` with the remaining seconds, and return its result. Raises NodeError.

    After an OSError, call ``ask`` again, for at most RETRY_S. In Kubernetes, call it again until the join timeout,
    because the network may become ready later.
    """
    deadline = time.monotonic() + (config.join_timeout_s if config.retries_network else RETRY_S)
    while True:
        try:
            return ask(deadline - time.monotonic())
        except OSError as error:
            if time.monotonic() + POLL_S >= deadline:
                raise node_error(Exit.UNAVAILABLE, "unavailable", describe(error), node=config.node_rank) from None
        time.sleep(POLL_S)


def _loopback_message(host: str, address: str) -> str:
    here = f"node 0's address is {address}" if host == address else f"the name '{host}' resolves to {address}"
    here += ", which other machines cannot reach"
    advice = "give node 0's address on the network as --master-addr"
    if host == machine.DEBIAN_ADDRESS:
        here += " (on Debian, hostname --ip-address prints it)"
        advice += ", or 127.0.0.1 if all nodes are on this machine"
    elif address == machine.DEBIAN_ADDRESS:
        here += f" (Debian's line '{address} {host}' in /etc/hosts)"
    return f"{here}: {advice}; this machine has {network.local_addresses()}"


def _reserve_port(config: NodeConfig, address: str) -> socket.socket:
    """Bind node 0's port, or a free port if none is set, so that no other process can take it."""
    port = config.master_port
    try:
        return network.bind(address, port) if port else network.bind_free_port(address)
    except OSError as error:
        message = network.describe_taken_port(address, port, error)
        if error.errno == errno.EADDRNOTAVAIL:
            message += f"; this machine has {network.local_addresses()}"
        raise node_error(Exit.UNAVAILABLE, "unavailable", message, node=0) from None


def check_limits(config: NodeConfig, report: PreflightReport) -> None:
    """Log a warning for each limit of this machine that is likely to harm the training."""
    report.begin("limits")
    device = os.environ.get(names.DEVICE, "")
    num_gpus, nodes = 0 if device == "cpu" else machine.count_gpus(), config.max_nodes
    ranks = config.local_world_size
    warnings = [*machine.health_warnings(num_gpus, local_world_size=ranks, num_nodes=nodes, device=device)]
    for line in warnings:
        report.warn(line)
    report.done("; ".join(warnings) or "no limit is too low", "warning" if warnings else "ok")
