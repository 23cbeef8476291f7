"""Measures how far apart the nodes' clocks are, through a store that the nodes share (torch.distributed.Store).

Keys: ``clock/asked`` counts the requests, ``clock/ask`` means that there are new ones, ``clock/answer/I`` is node 0's
time. A node that ends after it was counted delays no other one: the next request wakes node 0, which answers both.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

MAX_OFFSET_S = 2.0  # with more, the lines of several nodes are visibly out of order
NUM_REQUESTS = 3  # at most
SHORT_TRIP_S = 0.02  # the error of the offset is at most half of this: no further request is needed
WAIT = timedelta(days=30)  # the thread is a daemon: it ends when its process or the store ends


def answer_requests(store: Any) -> None:
    """Answer clock requests in a thread on node 0. ``store`` is a connection that only this thread uses."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the store no longer exists, and the other nodes have ended
            answered = 0
            while True:
                store.wait(["clock/ask"], WAIT)
                store.delete_key("clock/ask")  # before the requests are counted: a later one sets it again
                num_asked = store.add("clock/asked", 0)
                for number in range(answered + 1, num_asked + 1):
                    store.set(f"clock/answer/{number}", repr(time.time()))
                answered = num_asked

    threading.Thread(target=run, name="clock", daemon=True).start()


def offset_s(
    store: Any,
    now: Callable[[], float] = time.time,
    read: Callable[[str, bytes], float] = lambda _, value: float(value),
) -> float:
    """Return how many seconds this clock is ahead of node 0's clock. Raises RuntimeError.

    The result comes from the fastest of up to ``NUM_REQUESTS`` round trips. As in NTP, the answer is assumed to be node
    0's time in the middle of the round trip. ``read`` gets a key and its value, and returns the time.
    """
    trips = [(float("inf"), 0.0)]
    while len(trips) <= NUM_REQUESTS and min(trips)[0] > SHORT_TRIP_S:
        request_at = now()  # before the request is counted: node 0 may answer it when another node wakes it
        number = store.add("clock/asked", 1)
        store.set("clock/ask", "")
        key = f"clock/answer/{number}"
        node_0_time = read(key, store.get(key))
        answered = now()
        trips.append((answered - request_at, (request_at + answered) / 2 - node_0_time))
    return min(trips)[1]
