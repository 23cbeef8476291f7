"""The election of a new node 0 among the spares, after node 0 was lost (docs/decisions/0055-a-role-not-a-machine.md).

Each spare serves a standby store. A spare that has lost node 0 stands for election: it writes an epoch that only it can
use. A machine that has lost node 0 visits the standby stores in the order of their numbers, and votes for a spare that
stands. A spare with the votes of more than half of the electorate is the new node 0.

Keys of a standby store: ``stands`` is the epoch in which this spare stands, or 0. ``vote/EPOCH/MACHINE`` is a vote.
``leader`` has the epoch in which this spare was elected, and the address and port of its control store. ``used`` means
that this spare does not stand: it has taken the place of a node, or it can start fewer ranks than node 0 had.
"""

import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ddprun.system import network, stores
from ddprun.system.errors import node_error
from ddprun.system.stores import StoreError
from ddpwire.exits import Exit

ELECTION_S = 8.0  # with the 4 s after which node 0 counts as lost, and one more connection: less than 15 s
VOTE_S = 4.0  # how long a machine waits at a standby store: machines notice the loss at different times
POLL_S = 0.05  # many looks fit into VOTE_S
PAUSE_S = 0.2  # if no spare can be reached


@dataclass(frozen=True, kw_only=True)
class Electorate:
    """The machines that elect a new node 0: all nodes of the first attempt, and the spares."""

    epoch: int  # of the present node 0; the first one has epoch 0
    ranks: tuple[int, ...]  # of each node, also after a spare has taken its place
    standby: Mapping[int, tuple[str, int]]  # the address and port of each spare's standby store

    @property
    def machines(self) -> frozenset[int]:
        """The numbers of all machines."""
        return frozenset({*range(len(self.ranks)), *self.standby})

    @property
    def node_0(self) -> int | None:
        """The spare that is node 0 in this epoch, or None for the first node 0."""
        order = sorted(self.standby)
        return order[(self.epoch - 1) % len(order)] if self.epoch else None

    def is_majority(self, machines: Collection[int]) -> bool:
        """Return whether these are more than half of the electorate. Other machines do not count."""
        return 2 * len(self.machines & {*machines}) > len(self.machines)

    def next_epoch(self, spare: int, last: int) -> int:
        """Return the lowest epoch after ``last`` and after that of node 0 in which ``spare`` may stand.

        No other spare can stand in this epoch.
        """
        order = sorted(self.standby)
        first = max(last, self.epoch) + 1
        return first + (order.index(spare) + 1 - first) % len(order)

    def encode(self) -> str:
        """Return the value of the key ``electorate``."""
        return json.dumps({"epoch": self.epoch, "ranks": self.ranks, "standby": self.standby})


def read_electorate(value: Any) -> Electorate:
    """Return the electorate in ``value``, which comes from JSON."""
    standby = {int(spare): (str(host), int(port)) for spare, (host, port) in value["standby"].items()}
    return Electorate(epoch=int(value["epoch"]), ranks=tuple(map(int, value["ranks"])), standby=standby)


@dataclass(frozen=True, kw_only=True)
class Leader:
    """A new node 0."""

    spare: int  # the number of its machine
    epoch: int
    address: str
    port: int


@dataclass(kw_only=True)
class Voter:
    """A machine of the electorate. It votes at most once in each epoch, and only in epochs that increase."""

    machine: int
    electorate: Electorate
    connect: Callable[[str, int], Any]  # returns a store, or raises StoreError
    log: Callable[[str], None]
    check_stop: Callable[[], None]
    own: Any = None  # the standby store of a spare, which may be elected
    own_place: tuple[str, int] = ("", 0)  # where its control store will be
    leader_at: tuple[str, int] | None = None  # the standby store of the new node 0
    voted: int = field(default=0, init=False)
    _until: float = field(default=0.0, init=False)  # when the election ends

    def find_leader(self) -> Leader:
        """Return the new node 0, which all machines of a majority agree on. Raises NodeError if there is none.

        The ranks of this machine must have ended.
        """
        self._until, is_visited = time.monotonic() + ELECTION_S, set[int]()
        while time.monotonic() < self._until:
            for spare in sorted(self.electorate.standby.keys() - {self.electorate.node_0}):  # without the lost one
                self.check_stop()
                with contextlib.suppress(StoreError, OSError):
                    leader = self._stand() if spare == self.machine else self._visit(spare, is_visited)
                    if leader:
                        self.electorate = replace(self.electorate, epoch=leader.epoch)
                        self.leader_at = self.electorate.standby[leader.spare]
                        return leader
            time.sleep(PAUSE_S)
        message = f"node 0 was lost, and this machine has found no new node 0 within {ELECTION_S:g} s"
        number, every = len(is_visited), len(self.electorate.machines)
        hint = f"it reached {number} other spares, but more than half of all {every} machines must reach each other"
        raise node_error(Exit.ABSENT, "node_lost", message, hint=hint, node=0)

    def _visit(self, spare: int, is_visited: set[int]) -> Leader | None:
        """Vote for a spare if it stands for election. Return the leader if it is elected."""
        address, port = self.electorate.standby[spare]
        network.check_reachable(address, port, timeout_s=stores.CONNECT_TIMEOUT_S)
        store = self.connect(address, port)
        is_visited.add(spare)
        until, vote = min(self._until, time.monotonic() + VOTE_S), ""
        while time.monotonic() < until and not store.check(["used"]):
            self.check_stop()
            if leader := self._leader_in(store, spare):
                return leader
            if store.check(["stands"]):
                epoch = stores.decode("stands", store.get("stands"), int)
                if epoch > max(self.voted, self.electorate.epoch):
                    self.voted, vote = epoch, f"vote/{epoch}/{self.machine}"
                    store.set(vote, "")
            time.sleep(POLL_S)
        if vote:
            store.delete_key(vote)
        return self._leader_in(store, spare)

    def _leader_in(self, store: Any, spare: int) -> Leader | None:
        if not store.check(["leader"]):
            return None
        leader = stores.decode("leader", store.get("leader"), lambda value: Leader(spare=spare, **value))
        return leader if leader.epoch > self.electorate.epoch else None

    def _stand(self) -> Leader | None:
        """Stand for election on this spare. Return itself as the leader if it is elected."""
        if self.own.check(["used"]):
            return None
        epoch = self.electorate.next_epoch(self.machine, self.voted)
        self.voted = epoch
        self.own.set(f"vote/{epoch}/{self.machine}", "")
        self.own.set("stands", str(epoch))
        until, votes = min(self._until, time.monotonic() + VOTE_S), set[int]()
        while time.monotonic() < until and not self.electorate.is_majority(votes):
            self.check_stop()
            votes = {machine for machine in self.electorate.machines if self.own.check([f"vote/{epoch}/{machine}"])}
            time.sleep(POLL_S)
        address, port = self.own_place
        if self.electorate.is_majority(votes):
            self.own.set("leader", json.dumps({"epoch": epoch, "address": address, "port": port}))
        self.own.set("stands", "0")  # not deleted: another machine may be about to read it
        if not self.electorate.is_majority(votes):
            return None
        chosen = f"{len(votes)} of {len(self.electorate.machines)} machines have elected this spare as node 0"
        self.log(f"node 0 was lost: {chosen} (epoch {epoch})")
        return Leader(spare=self.machine, epoch=epoch, address=address, port=port)
