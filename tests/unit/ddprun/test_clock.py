"""The clocks of the nodes are compared through a real store."""

import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from ddpwire import clock


@pytest.fixture
def store():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    clock.answer_requests(store.clone())
    return store


def test_a_node_that_ends_during_its_request_does_not_delay_the_next_one(store):
    store.add("clock/asked", 1)
    began = time.monotonic()
    assert clock.offset_s(store.clone(), lambda: time.time() + 60) == pytest.approx(60, abs=5)
    assert time.monotonic() - began < 5  # the store's own timeout is 10 s


def test_a_further_request_is_made_only_after_a_long_trip(store):
    times = iter((0.0, 9.0, 9.0, 9.001))
    clock.offset_s(store, lambda: next(times))
    assert store.add("clock/asked", 0) == 2
