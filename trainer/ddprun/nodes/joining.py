"""How a node connects to node 0, and gets its number if no launcher assigns one. This module does not import torch.

With --rdzv-backend=c10d, all nodes run the same command. Then node 0 is the node whose machine has the address of the
endpoint. If several nodes run on that machine, node 0 is the one that first binds the port. Each other node claims the
lowest free number in node 0's store (``claim/NODE``, see rendezvous.py), and keeps it until its ddprun ends.

    node without a number                   node 0, which has bound the port
       -------- connect ---------------------->  again until it answers, or the port is free: then this is node 0
       <------- claim/0 -----------------------  another run, or another number of nodes: it ends
       -------- claim/1, claim/2, ... -------->  the first one that no other node has is its number
       -------- N/left ----------------------->  if it cannot start: node 0 need not wait for it
"""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection

from ddprun.files.run_identity import PROCESS_TOKEN
from ddprun.nodes import preflight
from ddprun.nodes.preflight import PreflightReport, Route, node_label
from ddprun.settings.node_config import DEFAULT_RUN_ID, UNNUMBERED, NodeConfig, read_secret
from ddprun.system import machine, network, processes
from ddprun.system.errors import NodeError, config_error, node_error
from ddpwire.exits import Exit
from ddpwire.machine import enumerate_ranges
from ddpwire.run_files import Outcome

PROGRESS_INTERVAL_S = 5.0  # of lines about missing nodes; nodes that start together meet earlier
POLL_S = 0.05  # nodes that start together need not wait for each other
FULL_POLL_S = 1.0  # while all numbers are claimed
REFUSAL_S = 10.0  # how long a node that cannot start tries to inform node 0
CLAIM_TIMEOUT_S = 300.0  # may include an import of torch from a cold disk


@dataclass(kw_only=True)
class Wait:
    """A wait for other nodes that has a time limit and logs its progress."""

    log: Callable[[str], None]
    limit_s: float
    check_stop: Callable[[], None] = lambda: None
    pause: Callable[[str], None] = lambda _: time.sleep(POLL_S)
    _started: float = field(default_factory=time.monotonic, init=False)
    _log_at_s: float = field(default=PROGRESS_INTERVAL_S, init=False)

    @property
    def passed_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return max(0.0, self.limit_s - self.passed_s)

    def is_over(self, missing: tuple[int, ...], cause: str = "", key: str = "") -> bool:
        """Return whether the time limit has passed. If it has not, first call ``pause`` with ``key``.

        Every PROGRESS_INTERVAL_S, log a line with the numbers of the ``missing`` nodes and ``why`` they are missing.
        """
        self.check_stop()
        if self.passed_s >= self.limit_s:
            return True
        if missing and self.passed_s >= self._log_at_s:
            self._log_at_s += PROGRESS_INTERVAL_S
            reason = f": {cause}" if cause else ""
            passed = f"({self.passed_s:.0f} of {self.limit_s:g} s)"
            self.log(f"waiting for {name_nodes(missing)} {passed}{reason}")
        self.pause(key)
        return False


def name_nodes(nodes: tuple[int, ...]) -> str:
    """Return the nodes as words for a message, such as ``nodes 1-3``."""
    return f"node{'s' * (len(nodes) > 1)} {enumerate_ranges(nodes)}"


def absent_error(config: NodeConfig, missing: tuple[int, ...], cause: str = "") -> NodeError:
    """Return the error for nodes that did not join in time."""
    message = f"{name_nodes(missing)} of {config.max_nodes} did not join within {config.join_timeout_s:g} s"
    return node_error(Exit.ABSENT, "absent", f"{message}: {cause}" if cause else message, node=missing[0])


def why_unreachable(config: NodeConfig, route: Route, timeout_s: float) -> str:
    """Return why this node cannot connect to node 0's port, or an empty string if it can."""
    address, port = route.address, config.master_port
    try:
        network.check_reachable(address, port, timeout_s=timeout_s)
    except OSError as error:
        place = f"{node_label(config.node_rank)} ({route.own})"
        return f"{place} tried to connect, but {network.describe_error(error, address, port)}"
    return ""


def run_facts(config: NodeConfig) -> dict[str, str]:
    """Return the settings that must be the same on all nodes of a run, keyed by their name in messages."""
    facts = {"run id": config.run_id, "number of nodes": f"{config.min_nodes}:{config.max_nodes}"}
    return facts | ({"number of spares": str(config.spares)} if config.spares else {})


def check_same_run(config: NodeConfig, node_0: Mapping[str, str]) -> None:
    """Raise NodeError if this node's run_facts differ from those in ``node_0``, which node 0 has published."""
    who = "this node" if config.node_rank == UNNUMBERED else f"node {config.node_rank}"
    for name, value in run_facts(config).items():
        if value != node_0[name]:
            raise config_error(f"the {name} is {value!r} on {who}, but {node_0[name]!r} on node 0")


def refusal(node: int, outcome: Outcome) -> Outcome:
    """Return the outcome that the other nodes get.

    ``node`` has ended with ``outcome`` before any ranks were started.
    """
    return replace(outcome, node=node, message=f"node {node} cannot start: {outcome.message}")


def report_refusal(outcome: Outcome, node: str, host: str, port: str, run_id: str) -> None:
    """Tell node 0 why this node cannot start, so that node 0 does not wait for it. Give up after REFUSAL_S.

    Do nothing if this is node 0, if this node was stopped, or if the network is unavailable. ``node``, ``host``,
    ``port`` and ``run_id`` may be invalid, because they come unchecked from the user.
    """
    is_reported = outcome.code not in (Exit.OK, Exit.UNAVAILABLE) and outcome.cause != "stopped"
    if is_reported and host and all(re.fullmatch(r"[0-9]{1,9}", text) and int(text) for text in (node, port)):
        with contextlib.suppress(ImportError, NodeError):  # torch is not installed, or the store is another run's
            _post_refusal(refusal(int(node), outcome), host, int(port), run_id or DEFAULT_RUN_ID)


def _post_refusal(outcome: Outcome, host: str, port: int, run_id: str) -> None:
    from ddprun.system import stores

    deadline = time.monotonic() + REFUSAL_S
    while (left_s := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError, ValueError, stores.StoreError):  # node 0 is not there yet
            address = network.resolve(host, timeout_s=left_s)
            network.check_reachable(address, port, timeout_s=left_s)
            control = stores.SignedStore(stores.connect(address, port), read_secret(os.environ), run_id)
            claim = stores.decode("claim/0", control.get("claim/0"), dict)
            if claim.get("run id") == run_id and control.check(["attempt"]):
                control.compare_set(f"{int(control.get('attempt'))}/left", "", json.dumps(asdict(outcome)))
                return
        time.sleep(POLL_S)


def settle_number(config: NodeConfig, log: Callable[[str], None], preload: Callable[[], None]) -> NodeConfig:
    """Return the configuration with this node's number, which node 0 assigns if no launcher does. Raises NodeError.

    ``log`` is called with progress lines. ``preload`` imports torch. It is called only if another node is node 0.
    """
    if config.node_rank != UNNUMBERED:
        return config
    config = replace(config, master_addr=_address_on_network(config))
    route = preflight.find_route(config, PreflightReport(log, quiet=True))
    if _becomes_host(config, route):
        return replace(config, node_rank=0)
    preload()
    limit_s, said_full = config.join_timeout_s, False
    wait = Wait(log=log, limit_s=limit_s, pause=lambda key: time.sleep(FULL_POLL_S if key else POLL_S))
    while True:
        reason = why_unreachable(config, route, wait.left_s)
        number = None if reason else _claim_number(config, route)
        if number:
            return replace(config, node_rank=number)
        if number is None:
            reason = reason or f"{route.address}:{config.master_port} closed the connection"
        elif not said_full:
            said_full = True
            log(
                f"the run already has all of its {config.max_nodes} nodes: this node waits until it can replace a "
                "lost node"
            )
        if reason and said_full:  # otherwise this node could become node 0 and start the training again
            raise _full_error(config)
        if wait.is_over((0,) if reason else (), reason, key="" if reason else "full"):
            raise absent_error(config, (0,), reason) if reason else _full_error(config)
        if reason and _becomes_host(config, route):  # node 0's ddprun has ended
            return replace(config, node_rank=0)


def _becomes_host(config: NodeConfig, route: Route) -> bool:
    """Return whether this node is node 0. Raises NodeError.

    The node is node 0 if its settings allow this, the endpoint's address belongs to this machine, and the port is free.
    """
    is_here = machine.is_loopback(route.address) or network.interface_of(route.address) is not None
    try:
        return is_here and config.may_host and network.lock_port(route.address, config.master_port)
    except OSError as error:
        message = network.describe_taken_port(route.address, config.master_port, error)
        raise node_error(Exit.UNAVAILABLE, "unavailable", message) from None


def _full_error(config: NodeConfig) -> NodeError:
    message = f"the run already has all of its {config.max_nodes} nodes, so this node cannot join"
    return config_error(message, hint="start fewer nodes, or start all nodes with a larger --nnodes")


def _address_on_network(config: NodeConfig) -> str:
    """Return the endpoint's host.

    If this host is the name of this machine and resolves to the loopback, return this machine's network address
    instead.
    """
    host = config.master_addr
    names = [name.partition(".")[0] for name in (host, socket.gethostname())]
    if names[0] == names[1] and not machine.is_loopback(host):
        with contextlib.suppress(OSError):
            if machine.is_loopback(network.resolve(host, timeout_s=preflight.RETRY_S)):
                host = "127.0.0.1"  # this machine may have no route to other networks
                return network.source_address(network.DOCUMENTATION_ADDRESS)
    return host


def _claim_number(config: NodeConfig, route: Route) -> int | None:
    """Claim and return the lowest free number. Return 0 if none is free, or None if node 0 did not answer.

    This is done in a forked process, because a store's client may block forever. A thread cannot be used, because the
    calling process must not start threads yet (fork_server.py). Raises NodeError.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_claim, args=(config, route, sender, os.getpid()))
    process.start()
    sender.close()
    answer: int | Outcome | None = None
    with receiver, contextlib.suppress(EOFError):  # the process has ended without an answer
        answer = receiver.recv() if receiver.poll(CLAIM_TIMEOUT_S) else None
    process.kill()
    process.join()
    if isinstance(answer, Outcome):
        raise NodeError(answer)
    return answer


def _claim(config: NodeConfig, route: Route, answer: Connection, parent: int) -> None:
    """Send the number, the outcome of an error, or None if node 0 does not answer."""
    from ddprun.system import stores

    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    processes.die_with_parent(parent)
    try:
        store = stores.connect_to_node_0(route.address, config.master_port)
        control = stores.SignedStore(store, config.secret, config.run_id)
        check_same_run(config, stores.decode("claim/0", control.get("claim/0"), dict))
        value = json.dumps({"token": PROCESS_TOKEN} | run_facts(config))
        nodes = range(1, config.max_nodes)
        claimed = (node for node in nodes if control.compare_set(f"claim/{node}", "", value).decode() == value)
        answer.send(next(claimed, 0))
    except NodeError as error:
        answer.send(error.outcome)
    except stores.StoreError:  # node 0 has ended meanwhile
        answer.send(None)
