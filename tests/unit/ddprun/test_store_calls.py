"""How many calls node 0 makes to its store as the number of nodes grows."""

import json
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from ddprun.nodes.consensus import Consensus, LivenessTracker
from ddprun.nodes.rendezvous import FixedRankRendezvous
from ddprun.settings import node_config, options


class CountingStore:
    """A store that counts the calls. When node 0 waits for a node, this node arrives."""

    port = 1

    def __init__(self) -> None:
        self._store, self.calls = HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self._store, name)

    def wait(self, keys: list[str], _timeout: object) -> None:
        (key,) = keys
        node = key.rpartition("/")[2]
        for name in (key, f"claim/{node}"):
            self._store.set(name, "")


def calls_to_gather(num_nodes: int) -> int:
    store = CountingStore()
    config = SimpleNamespace(
        node_rank=0,
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        one_port=True,
        join_timeout_s=60.0,
        is_replaced=False,
        spares=0,
        replaces_node_0=False,
    )
    rendezvous = object.__new__(FixedRankRendezvous)
    rendezvous._config, rendezvous.control, rendezvous.attempt = cast(Any, config), store, 1
    rendezvous._log, rendezvous._check_stop, rendezvous.previous_outcome = print, lambda: None, None
    rendezvous._gather()
    assert json.loads(store.get("1/group"))["members"] == list(range(num_nodes))
    return store.calls


def test_node_0_waits_for_nodes_with_a_number_of_calls_that_is_linear_in_them() -> None:
    few, many = calls_to_gather(50), calls_to_gather(400)
    assert many <= 12 * few  # 8 times the nodes; with a look at all of them after each arrival it is 60 times


@pytest.mark.parametrize("num_nodes", [3, 300])
def test_the_heartbeats_of_all_nodes_are_read_in_one_call(num_nodes: int) -> None:
    store, beat = CountingStore(), {"at": 0.0, "attempt": 1, "signs": []}
    for node in range(num_nodes):
        store.set(f"beat/{node}", json.dumps(beat))
    tracker = LivenessTracker(cast(Any, store), num_nodes)
    tracker.begin_attempt(1, tuple(range(num_nodes)))
    for number in range(10):  # in which all nodes are found, and none is silent for long
        tracker.update(number / 100)
    store.set("beat/2", json.dumps(beat | {"at": 1.0}))
    before = store.calls
    tracker.update(0.1)
    assert store.calls - before == 1
    assert (tracker.silent_s[1] > 0, tracker.silent_s[2]) == (True, 0.0)


def test_a_report_waits_while_another_call_of_the_store_takes_long():
    """A run whose report is dropped would never end."""
    goes_on, begun = threading.Event(), threading.Event()
    goes_on.set()

    def read_statuses():
        begun.set()
        goes_on.wait()
        return ()

    config = node_config.read_config(options.parse(["train.py"]), {}, lambda _: 1)
    own = Consensus(HashStore(), config, read_statuses=read_statuses, requeues=None, describe_success=str, history=())
    own.begin_attempt(1, (0,))
    goes_on.clear()
    begun.clear()
    begun.wait()  # a heartbeat is being sent
    own.post_success(0, is_last=True)
    goes_on.set()
    decision = own.wait(20.0)
    own.node_0_lost = True  # its threads end
    assert decision is not None
    assert decision.outcome.code == 0
