"""How a spare waits, with torch imported and without ranks, until it takes the place of a lost node.

A spare sends heartbeats to node 0, which gives it the number of a lost node. If node 0 is lost, the spare votes for
another spare or is elected itself (election.py). The control store's keys are listed in rendezvous.py.

    spare K                                 node 0                                 node J
       -------- standby/K, beat/K ------------>
       <------- electorate --------------------  all nodes and spares have joined
                                            deletes claim/J  <- - - beat/J has stopped
       <------- place/K = J -------------------
    becomes node J, and joins the next attempt
    or beat and electorate end with node 0: the election, after which spare K is node 0, or begins again there
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from ddprun.files.run_identity import PROCESS_TOKEN
from ddprun.nodes.consensus import HEARTBEAT_INTERVAL_S
from ddprun.nodes.election import Voter, read_electorate
from ddprun.nodes.joining import refusal
from ddprun.nodes.peer_checks import PeerChecks
from ddprun.nodes.preflight import StartedNode
from ddprun.nodes.rendezvous import FixedRankRendezvous
from ddprun.system import network, stores
from ddprun.system.errors import NodeError, store_lost_error
from ddprun.system.stores import StoreError
from ddpwire.run_files import read_outcome


class Spare:
    """A machine that waits to take the place of a lost node."""

    def __init__(self, node: StartedNode, check_stop: Callable[[], None]) -> None:
        """Serve the standby store for as long as this process runs. Raises OSError. ``check_stop`` raises NodeError."""
        self._node, self._log, self._check_stop = node, node.journal.log, check_stop
        own, config = node.route.own, node.config
        store = stores.serve(own, network.bind_free_port(own))
        self._store: Any = stores.SignedStore(store, secret=config.secret, run_id=config.run_id)
        self._listener = network.bind_free_port(own)  # of the control store, if this spare is elected
        self._voter: Voter | None = None

    def wait(self, checks: PeerChecks) -> tuple[StartedNode, Voter]:
        """Wait for a place. Return the node of its number, with the route to node 0. Raises NodeError.

        The error has the outcome of the run if the run ends.
        """
        while True:
            try:
                rendezvous = FixedRankRendezvous(self._node, checks, self._check_stop, self._voter)
                number, voter = self._wait_at(rendezvous, checks)
                self._store.set("used", "")
                return self._as_node(number, voter), voter
            except StoreError:
                if not self._voter:
                    raise store_lost_error() from None
            leader, config, route = self._voter.find_leader(), self._node.config, self._node.route
            is_elected = leader.spare == config.machine
            config = replace(config, master_addr=leader.address, master_port=leader.port)
            route = replace(route, address=leader.address, listener=self._listener if is_elected else None)
            self._node = replace(self._node, config=config, route=route)
            if is_elected:
                return self._as_node(0, self._voter), self._voter
            self._log(f"spare {leader.spare} ({leader.address}) is the new node 0")
            checks.compare_again()

    def _as_node(self, number: int, voter: Voter) -> StartedNode:
        """Return the node whose place this spare takes. It starts as many ranks as the node."""
        config, ranks = self._node.config, voter.electorate.ranks[number]
        config = replace(config, node_rank=number, spare=config.machine, local_world_size=ranks)
        return replace(self._node, config=config)

    def _wait_at(self, rendezvous: FixedRankRendezvous, checks: PeerChecks) -> tuple[int, Voter]:
        """Wait until node 0 gives this spare the number of a node, and return it. Raises NodeError and StoreError."""
        control, config, own = rendezvous.control, self._node.config, self._node.route.own
        machine = config.machine
        threading.Thread(target=self._send_heartbeats, args=(control.clone(),), name="spare", daemon=True).start()
        try:
            checks.compare(control)
        except NodeError as error:  # the nodes wait for this spare
            control.compare_set("1/left", "", json.dumps(asdict(refusal(machine, error.outcome))))
            raise
        place = [own, self._store.port, PROCESS_TOKEN]
        control.set(f"standby/{machine}", json.dumps(place))
        self._log(f"this machine is a spare of run {config.run_id}: it waits to take the place of a lost node")
        while not (self._voter and control.check([f"place/{machine}"])):
            self._check_stop()
            if control.check(["ended"]):
                outcome = read_outcome(control.get("ended").decode())
                control.set(f"ended/{machine}", "")
                raise NodeError(outcome)
            rendezvous.keep_claim()
            if not self._voter and control.check(["electorate"]):
                electorate = stores.decode("electorate", control.get("electorate"), read_electorate)
                own_place = own, self._listener.getsockname()[1]
                self._voter = rendezvous.new_voter(electorate, own=self._store, own_place=own_place)
                if config.local_world_size < self._voter.electorate.ranks[0]:
                    self._store.set("used", "")
            time.sleep(HEARTBEAT_INTERVAL_S)
        return stores.decode(f"place/{machine}", control.get(f"place/{machine}"), int), self._voter

    def _send_heartbeats(self, control: Any) -> None:
        """Send heartbeats until node 0 is lost, also while this spare starts as a node."""
        with contextlib.suppress(StoreError):
            while True:
                beat = {"at": time.monotonic(), "attempt": 0, "signs": []}
                control.set(f"beat/{self._node.config.machine}", json.dumps(beat))
                time.sleep(HEARTBEAT_INTERVAL_S)
