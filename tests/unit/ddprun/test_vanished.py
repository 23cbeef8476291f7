"""A node 0 that falls silent, and closes no connection, before the others train: every call to its store just waits."""

import contextlib
import socket
import threading
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, TCPStore

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
