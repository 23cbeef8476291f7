"""The store at node 0: one that falls silent, how many calls nodes make to it, and what is left of a client."""

import contextlib
import gc
import json
import socket
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fixtures.nodes import until
from torch.distributed import DistError, DistNetworkError, HashStore, TCPStore

from ddprun.nodes.consensus import Consensus, LivenessTracker
from ddprun.nodes.rendezvous import FixedRankRendezvous
from ddprun.settings import node_config, options
from ddprun.system import network, stores


@pytest.fixture
def silenced(monkeypatch):
    """A connection to a store whose machine loses its power when asked to: a proxy that passes nothing on any more."""
    monkeypatch.setattr(stores, "ANSWER_TIMEOUT_S", 0.5)
    timeout = timedelta(seconds=0.5)
    real = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    speaks = threading.Event()
    speaks.set()
    listener = network.bind("127.0.0.1", 0, listen=True)

    def carry(source, target):
        with contextlib.suppress(OSError), source:  # one of the two has hung up
            while data := source.recv(4096):
                speaks.wait()
                target.sendall(data)

    def accept():
        while True:
            try:
                ours, _ = listener.accept()
            except OSError:
                return
            theirs = socket.create_connection(("127.0.0.1", real.port))
            for ends in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=carry, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    port = listener.getsockname()[1]
    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)
    yield stores.TimeoutStore(client, timeout), speaks
    speaks.set()
    listener.close()


def test_an_answering_store_answers(silenced):
    store, _ = silenced
    store.set("a", "1")
    assert (store.get("a"), store.add("n", 2), store.check(["a"]), store.check(["b"])) == (b"1", 2, True, False)
    assert (store.compare_set("a", "1", "2"), store.compare_set("a", "1", "3")) == (b"2", b"2")
    assert store.clone().get("a") == b"2"
    store.wait(["a"])
    with pytest.raises(RuntimeError, match="timeout"):
        store.wait(["never"], timedelta(seconds=0.1))


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.get("a"),
        lambda store: store.add("n", 1),
        lambda store: store.check(["a"]),
        lambda store: store.compare_set("a", "", "1"),
        lambda store: store.wait(["a"], timedelta(seconds=0.1)),
        lambda store: store.clone(),
    ],
    ids=("get", "add", "check", "compare_set", "wait", "clone"),
)
def test_a_store_whose_machine_is_gone_raises_soon(silenced, call):
    store, speaks = silenced
    speaks.clear()
    for request in (call, lambda store: store.check(["a"])):
        with pytest.raises(DistNetworkError):
            request(store)


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
    rendezvous._is_leader, rendezvous.previous_outcome = True, None
    rendezvous._log, rendezvous._check_stop = print, lambda: None
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


def test_a_silent_node_loses_its_claim_and_the_ranks_of_an_earlier_attempt_do_not_count() -> None:
    store = HashStore()

    def beat(node: int, attempt: int, step: int) -> None:
        sign = {"rank": node, "node": node, "step": step, "silent_s": 0.0, "stopped": False, "busy": False}
        store.set(f"beat/{node}", json.dumps({"at": step, "attempt": attempt, "signs": [sign]}))

    for node in range(3):
        store.set(f"claim/{node}", "")
        beat(node, 1 + (node != 2), 7)
    tracker = LivenessTracker(cast(Any, store), 3)
    tracker.begin_attempt(2, (0, 1, 2))
    tracker.update(1000.0)
    tracker.update(1000.1)
    assert ([status.rank for status in tracker.statuses], tracker.step) == ([0, 1], 7)
    beat(1, 2, 5)
    tracker.update(2000.0)  # node 0 itself was paused
    assert (0 < tracker.silent_s[2] < 1, tracker.silent_s[1], tracker.step) == (True, 0.0, 7)
    for number in range(1, 20):
        beat(0, 2, 6)
        beat(1, 2, 5 + number % 2)
        tracker.update(2000.0 + number / 4)
    assert [store.check([f"claim/{node}"]) for node in range(3)] == [True, True, False]
    assert tracker.step == 7, "the highest, although its rank has ended"


def test_a_report_waits_while_another_call_of_the_store_takes_long():
    """A run whose report is dropped would never end."""
    goes_on, begun = threading.Event(), threading.Event()
    goes_on.set()

    def read_statuses():
        begun.set()
        goes_on.wait()
        return ()

    config = node_config.read_config(options.parse(["train.py"]), {}, lambda _: 1)
    own = Consensus(
        HashStore(),
        config,
        read_statuses=read_statuses,
        requeues=None,
        describe_success=str,
        on_resumes=list,
        history=(),
    )
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


def test_a_store_client_that_is_no_longer_used_leaves_no_thread_and_no_socket() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    client = stores.connect("127.0.0.1", server.port)
    client.set("a", "b")
    del client
    gc.collect()
    threads, descriptors = threading.active_count(), num_descriptors()
    for _ in range(5):
        client = stores.connect("127.0.0.1", server.port)
        client.set("a", "b")
        del client
        gc.collect()
    until(lambda: threading.active_count() <= threads and num_descriptors() <= descriptors)


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class SilentStore(HashStore):
    """A store whose machine has lost power: no call returns."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = threading.Event()

    def check(self, *_):
        self.ends.wait(30)
        return False

    set = add = compare_set = delete_key = check


@pytest.mark.parametrize("call", ["check", "get", "set", "add", "compare_set", "delete_key"])
def test_every_call_to_a_silent_store_ends_after_the_answer_timeout(call, monkeypatch):
    monkeypatch.setattr(stores, "ANSWER_TIMEOUT_S", 0.05)
    silent = SilentStore()
    store = stores.TimeoutStore(silent, timedelta(seconds=30), is_quick=True)
    arguments = {"check": (["k"],), "set": ("k", "v"), "add": ("k", 1), "compare_set": ("k", "", "v")}
    with pytest.raises(DistError):
        getattr(store, call)(*arguments.get(call, ("k",)))
    silent.ends.set()


def test_get_waits_for_a_key_that_another_node_sets():
    wrapped = HashStore()
    store = stores.TimeoutStore(wrapped, timedelta(seconds=30), is_quick=True)
    threading.Timer(0.1, lambda: wrapped.set("k", "v")).start()
    assert store.get("k") == b"v"
