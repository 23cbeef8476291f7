"""The rendezvous of a run's nodes: a handler for torch elastic that lets each node keep its configured rank.

elastic's own handler numbers the nodes by their addresses, sorted as strings. After a restart, its nodes may read keys
of the last attempt.
Here, node 0 serves a control store on the master port for as long as the run lasts. Each attempt has its own number,
and its own store for the ranks.

    node 0                                  node K
    attempt = N
       <------- claim/K, N/here/K -------------  it has arrived; node 0 waits for all nodes
    serves the store of the attempt
       -------- N/group ---------------------->  members of the attempt, and the port of its store
       <======= store of attempt N ===========>  for torch elastic and the ranks
    any node that gives up sets N/left: all others read it and end, too

Keys of the control store: ``claim/NODE`` describes the ddprun that is node NODE, with the number of ranks that it can
start. It is deleted when the node is lost.
``attempt`` is the number N of the latest attempt. ``N/here/NODE`` means that a node has arrived at attempt N.
``N/group`` has the number and the members of the attempt, and the port of its store. ``N/left`` is the outcome of a
node that gave up, and ``N/left/NODE`` means that node NODE has read it.

If node 0 is lost and replaced, the other nodes join the store of the new node 0. They write their earlier attempts into
its key ``history`` (consensus.py). The nodes meet there for attempt 1. Then node 0 gives this attempt the number that
follows the last failed attempt, and writes this number into ``1/group``.

If the run has spares (spares.py), ``standby/K`` describes spare K, and ``electorate`` the machines that elect a new
node 0 (election.py). ``place/K`` is the number of the node whose place spare K takes. ``ended`` is how the run has
ended, and ``ended/K`` means that spare K has read it.
"""

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in torch's __all__
    DistNetworkError,
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from ddprun.files.run_identity import PROCESS_TOKEN
from ddprun.nodes import joining
from ddprun.nodes.election import Electorate, Voter, read_electorate
from ddprun.nodes.joining import Wait
from ddprun.nodes.peer_checks import PeerChecks
from ddprun.nodes.preflight import RETRY_S, StartedNode
from ddprun.settings.node_config import NodeConfig
from ddprun.system import compat, network, stores
from ddprun.system.errors import NodeError, config_error, node_error, store_lost_error
from ddprun.system.restart_policy import NODE_LOST_S, read_attempts
from ddprun.system.stores import StoreError
from ddpwire.exits import Exit
from ddpwire.run_files import Outcome, read_outcome

ELASTIC_KEYS = "torchelastic/"  # the prefix of the keys that torch elastic itself keeps in an attempt's store
POLL_S = 0.05  # where no call can wait for the key
WAIT_S = 0.25  # for a key on node 0 and if there are spares; a wait ends when the key is set
GROUP_WAIT_S = 1.0  # the same on the other nodes, which all wait at the same time
SCAN_S, MAX_SCAN_S = 0.02, 1.0  # per node and at most, between two looks at all nodes
RESOLVE_S = 0.5  # between two lookups of node 0's name, whose address changes with the node
REACH_S = 1.0  # for an address that may be the previous node 0's
NAME_INTERVAL_S = 5.0  # between two lookups by node 0 of its own name, which each cost the name server a request
LEFT_READ_S = 3.0  # how long node 0 waits until the others have read why it gives up
CONNECT_TRIES = 4  # to connect to the store of an attempt
SPARES_S = 30.0  # how long the first rendezvous waits for spares after all nodes have arrived
SURVIVORS_S = 3.0  # how long a new node 0 waits for the other nodes before it replaces them
REPLACE_S = 6.0  # how long a lost node may take to come back if there is no spare
MAX_LATE_HEARTBEATS = 3  # of a ddprun that has ended: a network that works again may still deliver them


def _read_group(value: Any) -> dict[str, Any]:
    return {name: int(value[name]) for name in ("port", "attempt")} | {"members": tuple(map(int, value["members"]))}


def spare_ends(control: Store, config: NodeConfig) -> list[str]:
    """Return the keys with which the spares that are alive say that they have read how the run has ended."""
    spares = range(config.max_nodes, config.max_nodes + config.spares)
    alive = [spare for spare in spares if control.check([f"claim/{spare}"])]
    return [f"ended/{spare}" for spare in alive if not control.check([f"place/{spare}"])]


class FixedRankRendezvous(StaticTCPRendezvous):
    """Represents one node in every rendezvous of a run. As in a static rendezvous, no node joins during an attempt."""

    def __init__(
        self, node: StartedNode, checks: PeerChecks, check_stop: Callable[[], None], voter: Voter | None = None
    ) -> None:
        """Join the run. Raises NodeError. ``check_stop`` raises NodeError if a stop was requested.

        ``voter``: if this machine was a spare, what it knows of the run's other machines.
        """
        config = node.config
        place = config.master_addr, config.master_port, config.node_rank, config.max_nodes
        super().__init__(*place, config.run_id, int(config.join_timeout_s))
        self._config, self._route, self._log = config, node.route, node.journal.log
        self._checks, self._check_stop = checks, check_stop
        self._is_leader = config.node_rank == 0
        self._attempt_store: TCPStore | None = None
        self._voter, self.is_elected = voter, self._is_leader and voter is not None
        self._called: dict[int, int] = {}  # lost node → the spare that takes its place
        self._hopeless_at: float | None = None  # since when a node is lost and there is no spare
        self.attempt = 0
        self.members: tuple[int, ...] = ()
        self.previous_outcome: Outcome | None = None  # of the previous attempt
        self._signed = partial(stores.SignedStore, secret=config.secret, run_id=config.run_id)
        self.control: Any = None
        try:
            self.control = self._signed(self._host()) if self._is_leader else self._join()
            self._claim_node(PROCESS_TOKEN)  # a node that was not numbered has claimed it already
        except StoreError:
            if not voter:
                raise store_lost_error() from None
            if config.is_spare:  # it may be elected itself
                raise
            self.join_anew()
        if self._is_leader and config.is_replaced:
            threading.Thread(target=self._watch_name, name="node-0", daemon=True).start()

    @property
    def master(self) -> str:
        """Return the address of the control store as host:port."""
        return f"{self._config.master_addr}:{self.control.port}"

    @property
    def address(self) -> str:
        """Return the address of node 0."""
        return self._route.address

    def _host(self) -> TCPStore:
        assert self._route.listener is not None, "find_route has bound it on node 0"  # noqa: S101
        address, port = self._route.listener.getsockname()[:2]
        try:
            return stores.serve(address, self._route.listener)
        except OSError as error:
            message = network.describe_taken_port(address, port, error)
            raise node_error(Exit.UNAVAILABLE, "unavailable", message, node=0) from None

    def _join(self) -> Any:
        wait, config = self._new_wait(), self._config
        leader_at = self._voter.leader_at if self._voter else None
        moves = bool(config.is_replaced or leader_at)
        while True:
            left_s = min(wait.left_s, REACH_S) if moves else wait.left_s
            reason = self._resolve_again() if config.is_replaced else ""
            reason = reason or joining.why_unreachable(config, self._route, left_s)
            if not reason:
                try:
                    is_quick = config.spares > 0
                    store = stores.connect_to_node_0(self._route.address, config.master_port, is_quick=is_quick)
                    return self._signed(store)
                except NodeError as error:
                    if not moves:  # else the address may be that of the previous node 0
                        raise
                    reason = str(error)
            if wait.is_over((0,), reason):
                raise self._absent_error((0,), reason)
            if self._voter and self._is_node_0_lost(leader_at, wait):
                raise DistNetworkError("node 0 was lost")
            if moves:
                time.sleep(RESOLVE_S)

    def _is_node_0_lost(self, place: tuple[str, int] | None, wait: Wait) -> bool:
        """Return whether nobody answers at ``place``, the standby store of an elected node 0."""
        if not place:
            return wait.passed_s > NODE_LOST_S
        config, route = replace(self._config, master_port=place[1]), replace(self._route, address=place[0])
        return bool(joining.why_unreachable(config, route, stores.CONNECT_TIMEOUT_S))

    def _resolve_again(self) -> str:
        """Resolve node 0's name again, because a new node 0 has another address. Return why this failed, or ''."""
        host = self._config.master_addr
        try:
            self._route = replace(self._route, address=network.resolve(host, timeout_s=RETRY_S))
        except OSError as error:
            return network.describe_unresolved(host, error)
        return ""

    def join_anew(self) -> None:
        """Join the store of the new node 0, after the previous one was lost. Raises NodeError or StoreError.

        If the run has spares, first elect one of them.
        """
        if self._config.spares:
            if not self._voter or not self._voter.electorate.standby:
                raise store_lost_error()
            leader = self._voter.find_leader()
            self._config = replace(self._config, master_addr=leader.address, master_port=leader.port)
            self._route = replace(self._route, address=leader.address)
            self._log(f"spare {leader.spare} ({leader.address}) is the new node 0")
        self.control = self._join()
        self._claim_node(uuid.uuid4().hex)
        self._checks.compare_again()
        self.attempt = 0

    def is_store_lost(self) -> bool:
        """Return whether the control store no longer answers."""
        try:
            self.control.check(["attempt"])
        except StoreError:
            return True
        return False

    def _watch_name(self) -> None:
        """On node 0, raise NodeError when node 0's host name leads to another ddprun of the run. Runs in a thread.

        The error ends this node.
        """
        config = self._config
        while True:
            time.sleep(NAME_INTERVAL_S)
            with contextlib.suppress(OSError, StoreError, NodeError):
                address = network.resolve(config.master_addr, timeout_s=RETRY_S)
                if network.interface_of(address) is None:
                    value = self._signed(stores.connect(address, config.master_port)).get("claim/0")
                    claim = stores.decode("claim/0", value, dict)
                    is_of_run = claim.items() >= joining.run_facts(config).items()
                    if is_of_run and claim.get("token") != PROCESS_TOKEN:  # a service's address leads back to this node
                        break
        message = f"another ddprun has taken the place of node 0, on {address}"
        raise node_error(Exit.KILLED, "node_lost", message, node=0)

    def _claim_node(self, token: str) -> None:
        """Claim to be the node of this number. ``token`` is unique to this claim. Raises NodeError.

        Only one ddprun at a time has the claim. Node 0 deletes the claim of a silent node (consensus.py). If another
        ddprun has it, wait until it is deleted. Fail if that takes too long, or if the other ddprun is alive and is not
        that of a pod that this one replaces.
        """
        facts = joining.run_facts(self._config)
        self._claim = {"token": token, "ranks": self._config.local_world_size} | facts
        if self._is_leader:
            self._take_claim()
        claimed = self.control.get("claim/0")
        first = stores.decode("claim/0", claimed, lambda claim: {name: claim[name] for name in facts})
        joining.check_same_run(self._config, first)
        if not self._is_leader:  # a node of another run, on the wrong port, must not claim a rank
            self._take_claim()

    def _take_claim(self) -> None:
        node, wait = self._config.node_rank, self._new_wait()
        heartbeats, how = {self._heartbeat()}, "it is silent, but does not count as lost yet"
        while not self._has_claim():
            heartbeats.add(self._heartbeat())
            if len(heartbeats) > MAX_LATE_HEARTBEATS:
                if self._claim["token"] != PROCESS_TOKEN:
                    raise self._replaced_error()
                if not self._config.is_replaced:
                    raise config_error(f"another node is also node {node}: give each node its own --node-rank")
                how = "it is alive: the pod that this one replaces may still run"
            if wait.is_over((node,), f"another ddprun has the number of this node: {how}"):
                raise node_error(Exit.ABSENT, "absent", f"another ddprun is node {node} already: {how}", node=node)
        # The first heartbeat: if this ddprun ends before its next one, node 0 notices its silence.
        self.control.set(f"beat/{node}", json.dumps({"by": self._claim["token"], "attempt": 0, "signs": []}))

    def _has_claim(self) -> bool:
        """Return whether this node has the claim. If it was deleted, take it again."""
        key = f"claim/{self._config.node_rank}"
        claimed = self.control.compare_set(key, "", json.dumps(self._claim))
        return stores.decode(key, claimed, lambda claim: str(claim["token"])) == self._claim["token"]

    def keep_claim(self) -> None:
        """Take the claim again if node 0 deleted it because this process was paused. Raises NodeError."""
        was_deleted = not self.control.check([f"claim/{self._config.node_rank}"])
        if not self._has_claim():
            raise self._replaced_error()
        if was_deleted:
            self._log("this machine counted as lost, because it did not respond; it waits again")

    def _heartbeat(self) -> bytes:
        """Return the last heartbeat of the claim's owner, who is alive if the heartbeat changes."""
        key = f"beat/{self._config.node_rank}"
        return bytes(self.control.get(key)) if self.control.check([key]) else b""

    def _replaced_error(self) -> NodeError:
        node = self._config.node_rank
        message = f"this ddprun did not respond for too long: another ddprun has replaced it as node {node}"
        return node_error(Exit.KILLED, "node_lost", message, node=node)

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes for the next attempt. Raises NodeError."""
        try:
            if not self._has_claim():
                raise self._replaced_error()
            number = self.attempt + 1
            if self._is_leader:
                self.control.set("attempt", str(number))
            elif self.control.check(["attempt"]):
                latest = stores.decode("attempt", self.control.get("attempt"), int)
                number = max(number, latest + self.control.check([f"{latest}/group"]))
            self.attempt = number
            group = self._meet()
            self._read_electorate()
        except StoreError:
            self._raise_store_lost()
        if self._config.node_rank not in group["members"]:
            message = f"node {self._config.node_rank} joined too late: the run has begun without it"
            raise node_error(Exit.ABSENT, "absent", message, node=self._config.node_rank)
        self.members = tuple(group["members"])
        self._checks.report_members(self.members)
        self.attempt = group["attempt"]
        host, port = self._host_of_ranks, group["port"]
        store: Store | None = self._attempt_store
        if self._config.one_port:
            store = PrefixStore(f"{self.attempt}/store", self.control.wrapped)
        elif not self._is_leader:
            store = self._connect_to_attempt(host, port)
        assert store is not None, "_gather has created it on node 0"  # noqa: S101
        rank = self.members.index(self._config.node_rank)
        return RendezvousInfo(store, rank, len(self.members), RendezvousStoreInfo(host, port))

    def _connect_to_attempt(self, host: str, port: int) -> Store:
        """Connect to the attempt's store. Try again while node 0 answers: all nodes connect at the same time."""
        for is_last in (False,) * (CONNECT_TRIES - 1) + (True,):
            try:
                return stores.connect(host, port, is_quick=self._config.spares > 0)
            except StoreError:
                if is_last or self.is_store_lost():
                    self._raise_unreachable(port)
        raise AssertionError  # the last try returns or raises

    @property
    def _host_of_ranks(self) -> str:
        """Return node 0's name. If nodes are replaced, return its address: its name may still lead to the old node."""
        return self._route.address if self._config.replaces_node_0 else self._config.master_addr

    def _read_electorate(self) -> None:
        if self._config.spares and not self._is_leader:
            electorate = stores.decode("electorate", self.control.get("electorate"), read_electorate)
            self._voter = self._voter or self.new_voter(electorate)
            self._voter.electorate = electorate

    def new_voter(self, electorate: Electorate, **own: Any) -> Voter:
        """Return the voter of this machine. ``own``: of a spare, its store and its place as node 0."""

        def connect(address: str, port: int) -> Any:
            return self._signed(stores.connect(address, port, is_quick=True))

        machine, log, check_stop = self._config.machine, self._log, self._check_stop
        return Voter(machine=machine, electorate=electorate, connect=connect, log=log, check_stop=check_stop, **own)

    def _raise_unreachable(self, port: int) -> NoReturn:
        """Raise the error of a node that cannot connect to the attempt's store, on this port of node 0."""
        if self._config.replaces_node_0 and self.is_store_lost():
            self._raise_store_lost()
        config = replace(self._config, master_port=port)
        if reason := joining.why_unreachable(config, self._route, network.CONNECT_TIMEOUT_S):
            hint = "every port of node 0's machine must be open to the other nodes"
            raise node_error(Exit.UNAVAILABLE, "unavailable", reason, hint=hint, node=self._config.node_rank) from None
        self._raise_store_lost()

    def _raise_store_lost(self) -> NoReturn:
        if self._config.replaces_node_0:
            raise  # the agent joins the next node 0
        raise store_lost_error() from None

    def _meet(self) -> dict[str, Any]:
        try:
            self._checks.compare(self.control)
            self.control.set(f"{self.attempt}/here/{self._config.node_rank}", "")
            if self._is_leader:
                self._gather()
            return self._group()
        except NodeError as error:
            if not error.leaves:  # otherwise the others wait for its replacement
                self._post_failure(error)
            raise

    def _gather(self) -> None:
        """On node 0, wait for the other nodes, create the attempt's store, and choose the members."""
        wait = self._new_wait()
        while missing := self._missing():
            if self._config.spares:
                self._call_spares(missing, wait.passed_s)
            if self._wait_for(missing, wait):
                if len(self._arrived()) >= self._config.min_nodes:
                    break
                raise self._absent_error(self._missing() or missing)
        self._raise_if_left()
        if self._config.spares:
            self._called.clear()
            self._voter = self._voter or self.new_voter(self._await_spares())
            self.control.set("electorate", self._voter.electorate.encode())
        port = self.control.port
        if not self._config.one_port:
            host = self._host_of_ranks
            listener = network.bind_free_port(host)
            port = listener.getsockname()[1]
            self._attempt_store = stores.serve(host, listener)
        number, members = self.attempt, self._arrived()
        if self.control.check(["history"]):
            failed = stores.decode("history", self.control.get("history"), read_attempts)
            self.attempt = max(number, failed[-1].outcome.attempt + 1)
        group = json.dumps({"members": members, "port": port, "attempt": self.attempt})
        self.control.set(f"{self.attempt}/group", group)
        self.control.set("attempt", str(self.attempt))
        if number != self.attempt:
            self.control.set(f"{number}/group", group)

    def _await_spares(self) -> Electorate:
        """On node 0, wait for the spares before the first attempt. Return those that have come as an electorate."""
        config, wait = self._config, self._new_wait()
        spares = range(config.max_nodes, config.max_nodes + config.spares)
        while absent := [spare for spare in spares if not self.control.check([f"standby/{spare}"])]:
            self._raise_if_left()
            if wait.passed_s > SPARES_S or wait.is_over(tuple(absent)):
                self._log(f"the run begins without spare {', '.join(map(str, absent))}, which has not joined")
                break
        standby = {spare: self._read_standby(spare) for spare in spares if spare not in absent}
        places = {spare: (host, port) for spare, (host, port, _) in standby.items()}
        ranks = tuple(map(self._read_ranks, range(config.max_nodes)))
        for spare in places:
            most = self._read_ranks(spare)
            if nodes := tuple(node for node, num in enumerate(ranks) if num > most):
                which = joining.name_nodes(nodes)
                self._log(f"spare {spare} has --nproc-per-node {most}, too few ranks to take the place of {which}")
        return Electorate(epoch=0, ranks=ranks, standby=places)

    def _read_ranks(self, machine: int) -> int:
        """Return the number of ranks that a machine with a claim can start."""
        key = f"claim/{machine}"
        return stores.decode(key, self.control.get(key), lambda claim: int(claim["ranks"]))

    def _read_standby(self, spare: int) -> tuple[str, int, str]:
        """Return the address and port of a spare's standby store, and the token of its ddprun."""
        key = f"standby/{spare}"
        return stores.decode(key, self.control.get(key), lambda place: (str(place[0]), int(place[1]), str(place[2])))

    def _call_spares(self, missing: tuple[int, ...], passed_s: float) -> None:
        """On node 0, give the numbers of lost nodes to spares. Raises NodeError if there is none for REPLACE_S."""
        for node, spare in [*self._called.items()]:
            if node in missing and not self.control.check([f"claim/{spare}"]):  # it was lost, too
                self.control.delete_key(f"claim/{node}")
                del self._called[node]
        lost = [node for node in missing if not self.control.check([f"claim/{node}"])]
        is_due = passed_s > SURVIVORS_S if self.is_elected and not self.previous_outcome else self.previous_outcome
        if not lost or not is_due or not self._voter:
            self._hopeless_at = None
            return
        first = self._config.max_nodes
        free = [
            spare
            for spare in range(first, first + self._config.spares)
            if self.control.check([f"claim/{spare}", f"standby/{spare}"]) and not self.control.check([f"place/{spare}"])
        ]
        ranks = self._voter.electorate.ranks
        for node in lost:
            large = (spare for spare in free if self._read_ranks(spare) >= ranks[node])
            if (chosen := min(large, key=self._read_ranks, default=None)) is None:
                continue
            free.remove(chosen)
            host, _, token = self._read_standby(chosen)
            facts = {"token": token, "ranks": ranks[node]} | joining.run_facts(self._config)
            self.control.set(f"claim/{node}", json.dumps(facts))
            self.control.delete_key(f"{self.attempt}/here/{node}")  # the lost node may have arrived before
            self.control.set(f"place/{chosen}", str(node))
            self._called[node] = chosen
            self._log(f"spare {chosen} ({host}) takes the place of node {node}, which was lost")
        if unreplaced := [node for node in lost if node not in self._called]:
            self._hopeless_at = self._hopeless_at or time.monotonic()
            if time.monotonic() - self._hopeless_at > REPLACE_S:
                number = f"{self._config.spares} spare{'s' * (self._config.spares > 1)}"
                node = unreplaced[0]
                message = f"node {node} ({ranks[node]} ranks) was lost, and none of the {number} can take its place"
                raise node_error(Exit.KILLED, "node_lost", message, node=node)

    def _wait_for(self, missing: tuple[int, ...], wait: Wait) -> bool:
        """Wait until the missing nodes have arrived, but not long. Return whether the time limit has passed.

        This looks at one node at a time: a look at all nodes after each arrival takes the square of their number.
        """
        until, waiting = time.monotonic() + min(MAX_SCAN_S, SCAN_S * self._config.max_nodes), missing
        while waiting and time.monotonic() < until:
            key = f"{self.attempt}/here/{waiting[0]}"
            if self.control.check([key, f"claim/{waiting[0]}"]):
                waiting = waiting[1:]
                continue
            self._raise_if_left()
            if wait.is_over(waiting, key=key):
                return True
        return False

    def _arrived(self) -> tuple[int, ...]:
        nodes = tuple(range(self._config.max_nodes))
        keys = {node: [f"{self.attempt}/here/{node}", f"claim/{node}"] for node in nodes}
        if self.control.check([key for both in keys.values() for key in both]):  # one call, if all are there
            return nodes
        return tuple(node for node in nodes if self.control.check(keys[node]))

    def _missing(self) -> tuple[int, ...]:
        """Return the nodes to wait for. After a failure, lost nodes are left out if the job may shrink."""
        expected: Sequence[int] = range(self._config.max_nodes)
        if self.previous_outcome and self._config.min_nodes < self._config.max_nodes:
            present = [node for node in expected if self.control.check([f"claim/{node}"])]
            expected = present if self._config.min_nodes <= len(present) else expected
        return tuple(sorted({*expected} - {*self._arrived()}))

    def _group(self) -> dict[str, Any]:
        """Wait until node 0 has chosen the group. Return its number, its members and its store's port."""
        key = f"{self.attempt}/group"
        wait = self._new_wait(extra_s=stores.TIMEOUT.total_seconds())  # node 0 gives up first, and posts why
        while not self.control.check([key]):
            self._raise_if_left()
            if wait.is_over((), key=key):
                if self.control.check([f"{self.attempt - 1}/group"]):
                    return {"members": ()}  # the previous attempt is still running, without this node
                raise self._absent_error((0,))
        return stores.decode(key, self.control.get(key), _read_group)

    def _raise_if_left(self) -> None:
        if self.control.check([key := f"{self.attempt}/left"]):
            self.control.set(f"{key}/{self._config.node_rank}", "")
            raise NodeError(stores.decode(key, self.control.get(key), lambda value: read_outcome(json.dumps(value))))

    def _post_failure(self, error: NodeError) -> None:
        """Post the outcome for the other nodes. On node 0, whose end ends the store, wait until they have read it."""
        outcome = error.outcome
        if not self._is_leader and outcome.node is None:
            outcome = joining.refusal(self._config.node_rank, outcome)
        with contextlib.suppress(StoreError):  # node 0 is gone
            self.control.compare_set(f"{self.attempt}/left", "", json.dumps(asdict(outcome)))
            if self._is_leader:
                self.control.set("ended", json.dumps(asdict(outcome)))
            nodes = [node for node in range(1, self._config.max_nodes) if self.control.check([f"claim/{node}"])]
            keys, deadline = [f"{self.attempt}/left/{node}" for node in nodes], time.monotonic() + LEFT_READ_S
            keys += spare_ends(self.control, self._config)
            while self._is_leader and keys and not self.control.check(keys) and time.monotonic() < deadline:
                time.sleep(POLL_S)

    def _new_wait(self, extra_s: float = 0.0) -> Wait:
        limit_s = self._config.join_timeout_s + extra_s
        return Wait(log=self._log, limit_s=limit_s, check_stop=self._check_stop, pause=self._pause)

    def _pause(self, key: str) -> None:
        """Sleep briefly. If ``key`` is given, sleep only until the control store has this key."""
        if not key or (self._is_leader and self.control.check([key])):  # then the node's claim is missing
            time.sleep(POLL_S)
            return
        wait_s = WAIT_S if self._is_leader or self._config.spares else GROUP_WAIT_S
        with contextlib.suppress(DistStoreError):  # not yet
            self.control.wait([key], timedelta(seconds=wait_s))

    def _absent_error(self, missing: tuple[int, ...], cause: str = "") -> NodeError:
        last, limit_s = self.previous_outcome, self._config.join_timeout_s
        if last and last.cause == "node_lost" and last.node in missing:
            return NodeError(replace(last, message=f"{last.message}, and did not come back within {limit_s:g} s"))
        return joining.absent_error(self._config, missing, cause)

    def ranks_have_met(self) -> bool | None:
        """On node 0, return whether ranks have used the attempt's store, or None if this is unknown."""
        keys = compat.store_keys(self._attempt_store)
        return None if keys is None else any(not key.startswith(ELASTIC_KEYS) for key in keys)

    @property
    def use_agent_store(self) -> bool:
        """Return True, because the agent serves the attempt's store, and the ranks are its clients."""
        return True
