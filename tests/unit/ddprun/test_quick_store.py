"""A client of a run with spares: a store that does not answer counts as lost after one short limit, in every call."""

import threading
from datetime import timedelta

import pytest
from torch.distributed import DistError, HashStore

from ddprun.system import stores
from ddprun.system.stores import TimeoutStore


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
    store = TimeoutStore(silent, timedelta(seconds=30), is_quick=True)
    arguments = {"check": (["k"],), "set": ("k", "v"), "add": ("k", 1), "compare_set": ("k", "", "v")}
    with pytest.raises(DistError):
        getattr(store, call)(*arguments.get(call, ("k",)))
    silent.ends.set()


def test_get_waits_for_a_key_that_another_node_sets():
    wrapped = HashStore()
    store = TimeoutStore(wrapped, timedelta(seconds=30), is_quick=True)
    threading.Timer(0.1, lambda: wrapped.set("k", "v")).start()
    assert store.get("k") == b"v"
