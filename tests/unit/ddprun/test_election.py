"""The election of a new node 0: who is a majority, which epochs are used, and that no machine votes twice in one."""

import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from ddprun.nodes import election
from ddprun.nodes.election import Electorate, Leader, Voter
from ddprun.system import network, stores
from ddprun.system.errors import NodeError
from ddpwire.exits import Exit

HERE = "127.0.0.1"


def electorate(nodes: int = 3, spares: int = 2, epoch: int = 0) -> Electorate:
    standby = {nodes + number: (HERE, 1 + number) for number in range(spares)}
    return Electorate(epoch=epoch, ranks=(1,) * nodes, standby=standby)


@pytest.mark.parametrize(
    ("nodes", "spares", "votes", "expected"),
    [
        (3, 1, {1, 2, 3}, True),
        (3, 1, {2, 3}, False),  # half is not enough
        (3, 2, {2, 3, 4}, True),
        (2, 1, {1, 2}, True),
        (3, 1, {1, 2, 7}, False),  # another run's machine
        (3, 1, {1, 2}, False),
    ],
)
def test_majority_is_more_than_half_of_the_electorate(nodes, spares, votes, expected):
    assert electorate(nodes, spares).is_majority(votes) is expected


@pytest.mark.parametrize("nodes", range(2, 9))
def test_nodes_of_an_attempt_are_a_majority_and_others_are_too_few_for_a_second_one(nodes):
    for spares in range(1, nodes):
        every = electorate(nodes, spares)
        assert every.is_majority(range(nodes))
        assert len(every.machines) - nodes < nodes


def test_no_epoch_belongs_to_two_spares_and_none_is_used_again():
    every = electorate(3, 3, epoch=4)
    epochs = {spare: [every.next_epoch(spare, last) for last in range(12)] for spare in every.standby}
    for spare, of_spare in epochs.items():
        assert all(epoch > max(last, every.epoch) for last, epoch in enumerate(of_spare))
        others = {epoch for other, of_other in epochs.items() if other != spare for epoch in of_other}
        assert not others & {*of_spare}
        assert {replace(every, epoch=epoch).node_0 for epoch in of_spare} == {spare}, "who may stand in it"
    assert electorate(3, 3).node_0 is None


class Machines:
    """Machines of a run that have lost node 0. Each spare has a real standby store."""

    def __init__(self, nodes: int, spares: int):
        sign = partial(stores.SignedStore, secret=b"sixteen bytes ok", run_id="night")
        serve = partial(stores.serve, HERE)
        self.stores = {nodes + k: sign(serve(network.bind_free_port(HERE))) for k in range(spares)}
        self.electorate = Electorate(
            epoch=0, ranks=(1,) * nodes, standby={spare: (HERE, store.port) for spare, store in self.stores.items()}
        )
        self.connect = lambda address, port: sign(stores.connect(address, port, is_quick=True))
        self.leaders: dict[int, Leader | NodeError] = {}

    def voter(self, machine: int) -> Voter:
        own = self.stores.get(machine)
        return Voter(
            machine=machine, electorate=self.electorate, connect=self.connect, log=lambda _: None,
            check_stop=lambda: None, own=own, own_place=(HERE, 1000 + machine),
        )  # fmt: skip

    def elect(self, *machines: int) -> dict[int, Leader | NodeError]:
        """Let these machines, which reach each other, look for a new node 0."""

        def find(machine: int) -> None:
            try:
                self.leaders[machine] = self.voter(machine).find_leader()
            except NodeError as error:
                self.leaders[machine] = error

        threads = [threading.Thread(target=find, args=(machine,)) for machine in machines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return self.leaders


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(election, "ELECTION_S", 0.6)
    monkeypatch.setattr(election, "VOTE_S", 0.2)


def test_lowest_spare_is_elected_and_all_of_the_majority_follow_it():
    leaders = Machines(3, 2).elect(1, 2, 3, 4)
    assert {machine: (leader.spare, leader.epoch, leader.port) for machine, leader in leaders.items()} == dict.fromkeys(
        (1, 2, 3, 4), (3, 1, 1003)
    )


def test_next_spare_is_elected_if_the_first_is_used(short, monkeypatch):
    monkeypatch.setattr(election, "ELECTION_S", 20)
    machines = Machines(3, 2)
    machines.stores[3].set("used", "")
    assert {leader.spare for leader in machines.elect(1, 2, 4).values()} == {4}


def test_minority_elects_nobody(short):
    errors = Machines(3, 1).elect(2, 3)
    assert [error.code for error in errors.values()] == [Exit.ABSENT] * 2


def test_keys_that_a_machine_reads_after_it_has_seen_them_are_never_deleted(short):
    machines = Machines(3, 1)
    machines.elect(3)  # it stands, and is not elected
    assert machines.stores[3].check(["stands"])
    assert int(machines.stores[3].get("stands")) == 0


def test_machine_does_not_vote_in_an_epoch_of_its_last_vote_or_before(short):
    machines = Machines(3, 1)
    store, voter = machines.stores[3], machines.voter(1)
    voter.voted = 2
    for epoch, is_given in ((1, False), (2, False), (3, True)):
        store.set("stands", str(epoch))
        voter._until = time.monotonic() + 5
        voted = threading.Thread(target=voter._visit, args=(3, set()))
        voted.start()
        given = False
        while voted.is_alive():
            given = given or store.check([f"vote/{epoch}/1"])
        assert given is is_given
    assert voter.voted == 3
