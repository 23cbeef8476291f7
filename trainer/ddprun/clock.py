"""How far a node's clock is from node 0's, asked over the control store as NTP asks: the middle of a round trip.

Keys: ``clock/asked`` numbers the questions, ``clock/ask/I`` is one, ``clock/answer/I`` node 0's time.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but torch does not say so

NUM_QUESTIONS = 3
LATEST = timedelta(days=30)  # the thread is a daemon: it ends with ddprun, or with the store


def answer(store: Store, now: Callable[[], float] = time.time) -> None:
    """On node 0: answer whoever asks, from a thread; ``store`` is a connection of its own."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and so is everybody who asks
            for number in itertools.count(1):
                store.wait([f"clock/ask/{number}"], LATEST)
                store.set(f"clock/answer/{number}", repr(now()))

    threading.Thread(target=run, name="clock", daemon=True).start()


def offset_s(store: Store, now: Callable[[], float] = time.time) -> float:
    """How far this clock is ahead of node 0's, by the quickest of a few round trips. Raises RuntimeError."""
    trips = []
    for _ in range(NUM_QUESTIONS):
        number = store.add("clock/asked", 1)
        asked = now()
        store.set(f"clock/ask/{number}", "")
        theirs = float(store.get(f"clock/answer/{number}"))
        answered = now()
        trips.append((answered - asked, (asked + answered) / 2 - theirs))
    return min(trips)[1]
