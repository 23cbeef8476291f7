"""How the nodes agree on the end of an attempt: each posts what happens to its ranks, node 0 decides, all obey.

It speaks over the control store, from threads and connections of its own, and waits for keys, so that a verdict is
everywhere within milliseconds. Which failure counts is the verdict's matter, whether there is another attempt the
patience's, what is done about it the agent's.

Keys of attempt N: ``N/news`` counts what was posted and so orders it, ``N/news/I`` is one piece: a failure, or a node
whose ranks all ended with 0; ``N/verdict`` is the end, ``N/gone`` counts the nodes that have acted on it. Besides these
``beat/NODE``, which changes for as long as the node's ddprun lives, and says how its ranks do.
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, Store  # type: ignore[attr-defined]  # public, all

from ddprun.errors import store_gone
from ddprun.patience import Ended, Verdict, judge
from ddprun.pulse import Sign, describe, hung
from ddprun.roll import BEAT_S, Roll
from ddprun.verdict import LOST_AFTER_FAILURE_S, LOST_S, SETTLE_S, Failure, choose, outcome_of
from ddpwire.outcome import Outcome, read_outcome

POLL_S = 0.05


class Agreement:
    """The voice and the ear of this node in an attempt."""

    def __init__(
        self,
        store: Store,
        *,
        node: int,
        max_nodes: int,
        max_restarts: int,
        hang_timeout_s: float,
        look: Callable[[], Sequence[Sign]],
    ) -> None:
        """``look`` tells the signs of life of this node's ranks. Raises NodeError."""
        try:
            self._voice, self._ear = store.clone(), store.clone()  # a connection that waits can do nothing else
        except RuntimeError:
            raise store_gone() from None
        self._node = node
        self._leads = node == 0
        self._max_restarts = max_restarts
        self._hang_timeout_s = hang_timeout_s
        self._look = look
        self._roll = Roll(self._voice, max_nodes) if self._leads else None
        self._posting = threading.Lock()
        self._stirred = threading.Event()  # there is something new to listen for
        self._decided = threading.Event()
        self._turns = 0
        self._beat_due = 0.0
        self._lost = False  # node 0, and the store with it
        self._history: list[Ended] = []  # the attempts that failed, as node 0 keeps them
        self._attempt = 0
        self._members: tuple[int, ...] = ()
        self._verdict: Verdict | None = None
        self._failures: list[Failure] = []
        self._done: set[int] = set()
        self._num_news = 0
        self._began_at = self._failed_at = 0.0
        self._safely(self._beat)

    def start(self) -> None:
        """Let the others hear that this node lives, from now on until it ends."""
        threading.Thread(target=self._run, name="agreement", daemon=True).start()
        if not self._leads:
            threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def begin(self, attempt: int, members: tuple[int, ...]) -> None:
        """Enter an attempt: nothing is known of it yet."""
        with self._posting:
            self._attempt, self._members, self._verdict = attempt, members, None
            self._failures, self._done, self._num_news = [], set(), 0
            self._began_at = time.monotonic()
            self._decided.clear()
            if self._roll:
                self._roll.begin(attempt, members)
        if self._lost:
            self._lose_node_0()
        self._stirred.set()

    @property
    def verdict(self) -> Verdict | None:
        """What all nodes agreed on; None: the attempt goes on."""
        return self._verdict

    def wait(self, timeout_s: float) -> Verdict | None:
        """The verdict, as soon as there is one."""
        self._decided.wait(timeout_s)
        return self._verdict

    def fail(self, failure: Failure) -> None:
        """Post a failure of this node, at once: its place among the failures is what counts."""
        self._safely(lambda: self._post({"failure": asdict(failure)}))

    def done(self) -> None:
        """Post that all ranks of this node ended with 0."""
        self._safely(lambda: self._post({"done": self._node}))

    def gone(self) -> None:
        """Post that this node's ranks have ended after the verdict."""
        self._safely(lambda: self._voice.add(f"{self._attempt}/gone", 1))

    def wait_until_all_gone(self, timeout_s: float) -> None:
        """Keep node 0, and with it the stores, until the living others need them no more."""
        deadline = time.monotonic() + timeout_s
        while self._roll and time.monotonic() < deadline:
            with self._posting:
                gone = self._voice.add(f"{self._attempt}/gone", 0)
            silent = sum(seconds > LOST_AFTER_FAILURE_S for seconds in self._roll.silent_s.values())
            if gone + silent >= len(self._members):
                return
            time.sleep(POLL_S)

    def _post(self, piece: dict[str, object]) -> None:
        place = self._voice.add(f"{self._attempt}/news", 1)
        self._voice.set(f"{self._attempt}/news/{place}", json.dumps(piece))

    def _safely(self, act: Callable[[], object]) -> None:
        """Do something with the store; without node 0, which holds it, nothing."""
        if self._lost or not self._posting.acquire(timeout=LOST_S):
            return
        try:
            act()
        except RuntimeError:  # torch's DistNetworkError
            self._lose_node_0()
        finally:
            self._posting.release()

    def _lose_node_0(self) -> None:
        self._lost = True
        lost = Failure(node=0, rank=None, status=-signal.SIGKILL)
        self._set_verdict(self._verdict or Verdict(outcome=outcome_of(lost, attempt=max(1, self._attempt))))

    def _watch(self) -> None:
        """Notice a node 0 that is gone without a word: a machine without power, a cable. Then every call just waits.

        Counted in looks, not seconds: whoever was kept from running himself blames nobody.
        """
        turns, looks_in_vain = -1, 0
        while not self._lost:
            looks_in_vain = looks_in_vain + 1 if turns == self._turns else 0
            turns = self._turns
            if looks_in_vain * BEAT_S > LOST_S:
                self._lose_node_0()
            time.sleep(BEAT_S)

    def _run(self) -> None:
        while not self._lost:
            self._turns += 1
            if time.monotonic() >= self._beat_due:
                self._beat_due = time.monotonic() + BEAT_S
                self._safely(self._beat)
            rest_s = max(0.001, self._beat_due - time.monotonic())
            attempt = self._attempt
            if not attempt or self._verdict:
                self._stirred.wait(rest_s)
                self._stirred.clear()
                continue
            try:
                key = f"{attempt}/news/{self._num_news + 1}" if self._leads else f"{attempt}/verdict"
                self._ear.wait([key], timedelta(seconds=rest_s))
            except DistNetworkError:
                self._lose_node_0()
                return
            except DistStoreError:
                pass  # nothing new: what follows goes by the clock
            if attempt == self._attempt:
                self._safely(self._decide if self._leads else self._hear)

    def _beat(self) -> None:
        signs = [asdict(sign) for sign in self._look()]
        self._voice.set(
            f"beat/{self._node}", json.dumps({"at": time.monotonic(), "attempt": self._attempt, "signs": signs})
        )
        if self._roll:
            self._roll.listen(time.monotonic())

    def _hear(self) -> None:
        if self._voice.check([f"{self._attempt}/verdict"]):
            said = json.loads(self._voice.get(f"{self._attempt}/verdict"))
            outcome = read_outcome(json.dumps(said["outcome"]))
            self._set_verdict(Verdict(outcome=outcome, restart=said["restart"]))

    def _decide(self) -> None:
        assert self._roll is not None, "only node 0 decides"  # noqa: S101
        self._read_news()
        if len(self._done) == len(self._members) and not self._failures:
            self._announce(
                Verdict(outcome=Outcome(code=0, cause="ok", message="every rank exited with 0", attempt=self._attempt))
            )
            return
        settled = self._roll.all_heard_since_failure() and all(
            time.monotonic() - self._failed_at >= SETTLE_S.get(failure.code, 0.0) for failure in self._failures[:1]
        )
        failure = choose(tuple(self._failures), silent_s=self._roll.silent_s, settled=settled) or self._hang()
        if failure:
            now = time.monotonic()
            steps = [step for step in (self._roll.step, *(f.step for f in self._failures)) if step is not None]
            ended = Ended(
                outcome=outcome_of(failure, attempt=self._attempt),
                step=max(steps, default=None),
                lived_s=now - self._began_at,
            )
            self._history.append(ended)
            self._announce(judge(self._history, max_restarts=self._max_restarts))

    def _read_news(self) -> None:
        assert self._roll is not None, "only node 0 reads"  # noqa: S101
        while self._voice.check([key := f"{self._attempt}/news/{self._num_news + 1}"]):
            self._num_news += 1
            piece = json.loads(self._voice.get(key))
            if "done" in piece:
                self._done.add(piece["done"])
                continue
            if not self._failures:
                self._failed_at = time.monotonic()
                self._roll.failure()
            self._failures.append(Failure(**piece["failure"]))

    def _hang(self) -> Failure | None:
        if self._failures or self._roll is None:
            return None
        sign = hung(self._roll.signs, self._hang_timeout_s)
        if sign is None:
            return None
        why = describe(sign, self._hang_timeout_s)
        return Failure(node=sign.node, rank=sign.rank, status=-signal.SIGKILL, step=sign.step, hung=why)

    def _announce(self, verdict: Verdict) -> None:
        self._voice.set(f"{self._attempt}/verdict", json.dumps(verdict.as_dict()))
        self._set_verdict(verdict)

    def _set_verdict(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._decided.set()
