"""Where the nodes of a run meet: a handler for torch elastic in which a node's rank is its contract's.

(elastic's own sorts addresses as strings, and its restarts race on stale keys.) Node 0 hosts a control store on the
master's port for as long as the run lives; every attempt has a number and a store of its own, which the ranks use.

Keys of the control store: ``claim/NODE`` is what a node says of itself, taken back when it is lost; ``attempt`` the
number N of the latest; ``N/here/NODE`` that a node has come to attempt N; ``N/group`` who takes part and where the
attempt's store is; ``N/left`` the outcome of one that gave up.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]  # public, all
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from ddprun import network, ports, stores
from ddprun.checks import Checks
from ddprun.claims import Claim, next_attempt
from ddprun.contract import Contract
from ddprun.errors import NodeError, bad_contract, refused, store_gone
from ddprun.preflight import Way
from ddprun.waiting import Wait, who
from ddpwire.exits import Exit
from ddpwire.outcome import Outcome, read_outcome

POLL_S = 0.05


class FixedRankRendezvous(RendezvousHandler):
    """The meetings of one run, as one node goes to them."""

    def __init__(
        self,
        contract: Contract,
        way: Way,
        checks: Checks,
        *,
        say: Callable[[str], None],
        check_stop: Callable[[], None],
    ) -> None:
        """``say`` tells a person what is being waited for; ``check_stop`` raises when a stop was asked for."""
        self._contract = contract
        self._way = way
        self._checks = checks
        self._say = say
        self._check_stop = check_stop
        self._leads = contract.node_rank == 0
        self._attempt_store: TCPStore | None = None
        self.attempt = 0
        self.members: tuple[int, ...] = ()
        self.after: Outcome | None = None  # how the attempt before ended
        self.control: TCPStore | stores.AnsweringStore = self._host() if self._leads else self._join()
        try:
            self._claim = self._take_place()
        except RuntimeError:
            raise store_gone() from None

    @property
    def master(self) -> str:
        """host:port of the control store."""
        return f"{self._contract.master_addr}:{self.control.port}"

    def _host(self) -> TCPStore:
        assert self._way.listener is not None, "find_way has bound it on node 0"  # noqa: S101
        address, port = self._way.listener.getsockname()[:2]
        try:
            return stores.serve(address, self._way.listener)
        except OSError as error:
            raise refused(Exit.UNAVAILABLE, "unavailable", ports.taken(address, port, error), node=0) from None

    def _join(self) -> stores.AnsweringStore:
        address, port = self._way.address, self._contract.master_port
        wait = self._waiting()
        while True:
            try:
                network.reach(address, port, timeout_s=wait.left_s)
                break
            except OSError as error:
                reason = f"node-{self._contract.node_rank} ({self._way.own}): {network.why(error, address, port)}"
            if wait.is_over((0,), reason):
                raise self._absent((0,), reason)
        try:
            return stores.connect(address, port)
        except RuntimeError:
            message = f"{address}:{port} answers, but not as node 0's store: is something else listening there?"
            raise refused(Exit.UNAVAILABLE, "unavailable", message) from None

    def _take_place(self) -> Claim:
        node, contract = self._contract.node_rank, self._contract
        said = {"run id": contract.run_id, "number of nodes": f"{contract.min_nodes}:{contract.max_nodes}"}
        wait, claim = self._waiting(), Claim(self.control, node, said)
        if self._leads:
            claim.take(lambda why: wait.is_over((node,), why))
        first = json.loads(self.control.get("claim/0"))
        for word in ("run id", "number of nodes"):
            if said[word] != first[word]:
                raise bad_contract(f"the {word} of node {node} is {said[word]}, but node 0's is {first[word]}")
        if not self._leads:  # a stranger who found another run's port must not take a place in it
            claim.take(lambda why: wait.is_over((node,), why))
        return claim

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the others for the next attempt. Raises NodeError."""
        try:
            self._claim.keep()
            self.attempt = next_attempt(self.control, self.attempt, leads=self._leads)
            group = self._meet()
        except RuntimeError:
            raise store_gone() from None
        if self._contract.node_rank not in group["members"]:
            message = f"node {self._contract.node_rank} came when the run had begun without"
            raise refused(Exit.ABSENT, "absent", message, node=self._contract.node_rank)
        self.members = tuple(group["members"])
        self._checks.met(self.members)
        host, port = self._contract.master_addr, int(group["port"])
        try:
            store = self._attempt_store if self._leads else stores.connect(host, port)
        except RuntimeError:
            raise store_gone() from None
        assert store is not None, "node 0 has made it in _gather"  # noqa: S101
        rank = self.members.index(self._contract.node_rank)
        return RendezvousInfo(store, rank, len(self.members), RendezvousStoreInfo(host, port))

    def _meet(self) -> dict[str, Any]:
        try:
            self._checks.arrived(self.control)
            self.control.set(f"{self.attempt}/here/{self._contract.node_rank}", "")
            if self._leads:
                self._gather()
            return self._group()
        except NodeError as error:
            self._leave(error)
            raise

    def _gather(self) -> None:
        """On node 0: wait for the others, make the attempt's store, and close the group."""
        wait = self._waiting()
        while missing := self._missing():
            self._raise_if_left()
            if wait.is_over(missing, key=f"{self.attempt}/here/{missing[0]}"):
                if len(self._here()) >= self._contract.min_nodes:
                    break
                raise self._absent(missing)
        host = self._contract.master_addr
        listener = ports.listen_anywhere(host)
        port = listener.getsockname()[1]
        self._attempt_store = stores.serve(host, listener)
        self.control.set(f"{self.attempt}/group", json.dumps({"members": self._here(), "port": port}))

    def _here(self) -> tuple[int, ...]:
        """The nodes that have come to this attempt, and are not lost."""
        nodes = range(self._contract.max_nodes)
        return tuple(node for node in nodes if self.control.check([f"{self.attempt}/here/{node}", f"claim/{node}"]))

    def _missing(self) -> tuple[int, ...]:
        """Who is waited for. After a failure those that were lost are not, where the job may shrink."""
        everyone = tuple(range(self._contract.max_nodes))
        left = tuple(node for node in everyone if self.control.check([f"claim/{node}"]))
        expected = left if self.after and self._contract.min_nodes <= len(left) else everyone
        return tuple(sorted({*expected} - {*self._here()}))

    def _group(self) -> dict[str, Any]:
        """Who takes part, and the port of the attempt's store, as node 0 says it."""
        wait = self._waiting(extra_s=stores.TIMEOUT.total_seconds())  # node 0 gives up first, and says so
        while not self.control.check([f"{self.attempt}/group"]):
            self._raise_if_left()
            if wait.is_over((), key=f"{self.attempt}/group"):
                if self.control.check([f"{self.attempt - 1}/group"]):
                    return {"members": ()}  # the attempt before goes on, without this node
                raise self._absent((0,))
        group: dict[str, Any] = json.loads(self.control.get(f"{self.attempt}/group"))
        return group

    def _raise_if_left(self) -> None:
        if self.control.check([f"{self.attempt}/left"]):
            raise NodeError(read_outcome(self.control.get(f"{self.attempt}/left").decode()))

    def _leave(self, error: NodeError) -> None:
        """Tell the others why; node 0 lingers until they have read it."""
        try:
            self.control.compare_set(f"{self.attempt}/left", "", json.dumps(asdict(error.outcome)))
            if self._leads and self._contract.max_nodes > 1:
                time.sleep(10 * POLL_S)
        except RuntimeError:
            pass  # node 0 is gone

    def _waiting(self, extra_s: float = 0.0) -> Wait:
        return Wait(self._contract, extra_s, self._say, self._check_stop, self._pause)

    def _pause(self, key: str) -> None:
        """Sleep a little, not longer than until ``key`` is in the control store."""
        if not key or self.control.check([key]):
            time.sleep(POLL_S)
            return
        try:
            self.control.wait([key], timedelta(seconds=POLL_S))
        except DistNetworkError:
            raise
        except DistStoreError:
            pass  # not yet

    def _absent(self, missing: tuple[int, ...], why: str = "") -> NodeError:
        limit_s = self._contract.join_timeout_s
        if self.after and self.after.cause == "node_lost":
            return NodeError(
                replace(self.after, message=f"{self.after.message}, and did not come back in {limit_s:g} s")
            )
        message = f"{who(missing)} of {self._contract.max_nodes} did not come within {limit_s:g} s"
        return refused(Exit.ABSENT, "absent", f"{message} ({why})" if why else message, node=missing[0])

    @property
    def use_agent_store(self) -> bool:
        """The ranks are clients of the attempt's store; none of them hosts it."""
        return True

    def get_backend(self) -> str:
        """A name for torch elastic."""
        return "ddprun"

    def get_run_id(self) -> str:
        """The run's id."""
        return self._contract.run_id

    def num_nodes_waiting(self) -> int:
        """Nobody joins in the middle of an attempt."""
        return 0

    def is_closed(self) -> bool:
        """It is open for as long as this node lives."""
        return False

    def set_closed(self) -> None:
        """Nothing to close: the stores end with node 0."""

    def shutdown(self) -> bool:
        """Nothing to close: the stores end with node 0."""
        return True
