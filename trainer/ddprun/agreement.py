"""How the nodes agree on the end of an attempt: each posts what happens to its ranks, node 0 decides, all obey.

It speaks over the control store, from a thread and a connection of its own. Which failure counts is the verdict's
matter; what is done about it, the agent's.

Keys of attempt N: ``N/failures`` counts them and so orders them, ``N/failure/I`` is one, ``N/done`` counts the nodes
whose ranks all ended with 0, ``N/verdict`` is the outcome, ``N/gone`` counts the nodes that have acted on it.
``beat/NODE`` counts up for as long as the node's ddprun lives.
"""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but torch does not say so

from ddprun.verdict import LOST_AFTER_FAILURE_S, SETTLE_S, Failure, choose, outcome_of
from ddpwire.outcome import Outcome, read_outcome

TICK_S = 0.05
BEAT_S = 0.25


@dataclass(kw_only=True)
class Beat:
    """A node's heartbeat as node 0 hears it."""

    count: int
    moved_at: float
    at_failure: int = 0  # its count when the first failure came


class Agreement:
    """The voice and the ear of this node in an attempt."""

    def __init__(self, store: Store, *, node: int) -> None:
        self._store = store
        self._node = node
        self._leads = node == 0
        self._posting = threading.Lock()
        self._news = threading.Event()
        self._attempt = 0
        self._members: tuple[int, ...] = ()
        self._verdict: Outcome | None = None
        self._beats: dict[int, Beat] = {}
        self._failures: list[Failure] = []
        self._failed_at = 0.0
        self._beat_due = 0.0
        store.add(f"beat/{node}", 1)

    def start(self) -> None:
        """Let the others hear that this node lives, from now on until it ends."""
        threading.Thread(target=self._run, name="agreement", daemon=True).start()

    def begin(self, attempt: int, members: tuple[int, ...]) -> None:
        """Enter an attempt: nothing is known of it yet."""
        with self._posting:
            now = time.monotonic()
            self._attempt, self._members, self._verdict = attempt, members, None
            self._failures = []
            self._beats = {node: Beat(count=-1, moved_at=now) for node in members if node != self._node}

    @property
    def verdict(self) -> Outcome | None:
        """What all nodes agreed on; None: the attempt goes on."""
        return self._verdict

    def fail(self, failure: Failure) -> None:
        """Post a failure of this node, at once: its place among the failures is what counts."""
        with self._posting, self._or_node_0_lost():
            place = self._store.add(f"{self._attempt}/failures", 1)
            self._store.set(f"{self._attempt}/failure/{place}", json.dumps(asdict(failure)))
        self._news.set()

    def done(self) -> None:
        """Post that all ranks of this node ended with 0."""
        with self._posting, self._or_node_0_lost():
            self._store.add(f"{self._attempt}/done", 1)
        self._news.set()

    def gone(self) -> None:
        """Post that this node's ranks have ended after the verdict."""
        with self._posting, self._or_node_0_lost():
            self._store.add(f"{self._attempt}/gone", 1)

    def wait_until_all_gone(self, timeout_s: float) -> None:
        """Keep node 0, and with it the stores, until the living others need them no more."""
        deadline = time.monotonic() + timeout_s
        while self._leads and time.monotonic() < deadline:
            silent = [beat for beat in self._beats.values() if time.monotonic() - beat.moved_at > LOST_AFTER_FAILURE_S]
            with self._posting:
                gone = self._store.add(f"{self._attempt}/gone", 0)
            if gone + len(silent) >= len(self._members):
                return
            time.sleep(TICK_S)

    @contextlib.contextmanager
    def _or_node_0_lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:  # torch's DistStoreError and DistNetworkError: the store went with node 0
            lost = Failure(node=0, rank=None, status=-signal.SIGKILL)
            self._verdict = self._verdict or outcome_of(lost, attempt=self._attempt)

    def _run(self) -> None:
        while True:
            self._news.wait(TICK_S)
            self._news.clear()
            with self._posting, self._or_node_0_lost():
                self._tick(time.monotonic())

    def _tick(self, now: float) -> None:
        beat_is_due = now >= self._beat_due
        if beat_is_due:
            self._beat_due = now + BEAT_S
            self._store.add(f"beat/{self._node}", 1)
        if self._leads and beat_is_due:
            self._listen(now)
        if not self._members or self._verdict:
            return
        if self._leads:
            self._verdict = self._decide(now)
            if self._verdict:
                self._store.set(f"{self._attempt}/verdict", json.dumps(asdict(self._verdict)))
        elif self._store.check([f"{self._attempt}/verdict"]):
            self._verdict = read_outcome(self._store.get(f"{self._attempt}/verdict").decode())

    def _listen(self, now: float) -> None:
        for node, beat in self._beats.items():
            count = self._store.add(f"beat/{node}", 0)
            if count != beat.count:
                beat.count, beat.moved_at = count, now

    def _decide(self, now: float) -> Outcome | None:
        known = len(self._failures)
        posted = self._store.add(f"{self._attempt}/failures", 0)
        for key in (f"{self._attempt}/failure/{place}" for place in range(known + 1, posted + 1)):
            if not self._store.check([key]):
                break  # counted, but not written yet
            self._failures.append(Failure(**json.loads(self._store.get(key))))
        if self._failures and not known:
            self._failed_at = now
            for beat in self._beats.values():
                beat.at_failure = beat.count
        if not self._failures and self._store.add(f"{self._attempt}/done", 0) == len(self._members):
            return Outcome(code=0, cause="ok", message="every rank exited with 0", attempt=self._attempt)
        settled = now - self._failed_at >= SETTLE_S and all(
            beat.count >= beat.at_failure + 2 for beat in self._beats.values()
        )
        silent_s = {node: now - beat.moved_at for node, beat in self._beats.items()}
        failure = choose(tuple(self._failures), silent_s=silent_s, settled=settled)
        return outcome_of(failure, attempt=self._attempt) if failure else None
