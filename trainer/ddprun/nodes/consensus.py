"""The consensus of the nodes on how an attempt ends: nodes report how their ranks end, and node 0 decides for all.

The nodes exchange reports and decisions through the control store. Each node uses separate threads and connections for
this. One thread waits until the next key is set, so that a decision reaches all nodes within milliseconds.
``restart_policy`` determines which failure counts and whether the ranks are restarted. The agent carries out the
decision.

    node 0                                  node K
       <------- beat/K, every 0.25 s ----------  a node whose heartbeat does not change is lost
       <------- N/news/I ----------------------  a rank has ended
    waits for earlier causes, and decides
       -------- N/verdict -------------------->  ends its ranks
       <------- N/gone ------------------------  they have ended: attempt N + 1 begins, or the run ends

Keys of attempt N: ``N/news`` is the number of reports. ``N/news/I`` is report I: a failure, a rank that exited with
0, or what a node's ranks resume from.
``N/verdict`` is the decision. ``N/gone`` is the number of nodes whose ranks have ended since the decision.
``beat/NODE`` is a node's heartbeat. It contains the attempt, the status of the node's ranks and a time.

Two more keys are used if lost nodes are replaced. A node that has been asked to stop sets ``N/leaving/NODE``.
``history`` has all failed attempts, and each node keeps a copy of it. If node 0 is lost, the other nodes write their
copy into the store of the next node 0.
"""

import json
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in torch's __all__
    DistNetworkError,
    DistStoreError,
    Store,
)

from ddprun.files.node_dir import Requeues
from ddprun.health.heartbeat_monitor import RankStatus, describe_hang, find_hung_rank
from ddprun.health.resumes import Resume
from ddprun.nodes.rendezvous import spare_ends
from ddprun.settings.node_config import NodeConfig
from ddprun.system import restart_policy, stores
from ddprun.system.errors import store_lost_error
from ddprun.system.restart_policy import (
    NODE_LOST_S,
    SETTLE_S,
    Decision,
    FailedAttempt,
    Failure,
    outcome_of,
    read_attempts,
)
from ddpwire.run_files import Outcome, read_outcome

HEARTBEAT_INTERVAL_S = 0.25  # many fit into NODE_LOST_S, so a late one is no loss
WAITING_INTERVAL_S = 1.0  # of heartbeats before an attempt begins, except on node 0, which also reads them
MAX_NEW = 8  # nodes without a heartbeat that an update looks for: each costs a call, so an update stays short
LEAVE_TIMEOUT_S = 2.0  # short: the ranks get their signal only afterwards
POLL_S = 0.05  # while the ranks of other nodes end
HINT = "a spare would take its place (--spares)"


@dataclass(kw_only=True)
class NodeLiveness:
    """The last heartbeat of a node, and for how long it has not changed."""

    value: bytes = b""
    silent_s: float = 0.0
    num_changes: int = 0  # since a rank or node failed
    is_lost: bool = False


def _read_heartbeat(value: Any) -> tuple[int, tuple[RankStatus, ...]]:
    return int(value["attempt"]), tuple(RankStatus(**status) for status in value["signs"])


def _read_decision(value: Any) -> Decision:
    return Decision(outcome=read_outcome(json.dumps(value["outcome"])), restart=bool(value["restart"]))


def _read_post(value: Any) -> Failure | list[Resume] | tuple[int, int | None]:
    if "resumes" in value:
        return [Resume(**resume) for resume in value["resumes"]]
    return Failure(**value["failure"]) if "failure" in value else (int(value["exited"]), value["done"])


class LivenessTracker:
    """Tracks on node 0 which nodes are alive, and the status of their ranks.

    A node is lost if its heartbeat has not changed for NODE_LOST_S. Then its claim is deleted, so that a new ddprun can
    take its number. In each update, a node's silence grows by at most twice the update interval. So a pause of node 0
    itself does not count as a long silence of the other nodes.
    """

    def __init__(self, store: Store, max_nodes: int) -> None:
        self._store = store
        self._nodes = {node: NodeLiveness() for node in range(max_nodes)}
        self._new, self._known = deque(range(max_nodes)), list[int]()  # nodes without and with a heartbeat
        self._attempt = 0
        self._members: tuple[int, ...] = ()
        self._updated_at = 0.0
        self.statuses: tuple[RankStatus, ...] = ()  # of all ranks of the attempt
        self.step: int | None = None  # the highest step in the attempt

    def begin_attempt(self, attempt: int, members: tuple[int, ...]) -> None:
        """Start an attempt. Its nodes have just sent a heartbeat, so set their silence to 0."""
        self._attempt, self._members = attempt, members
        self.statuses, self.step = (), None
        # They have met, so update need not look for them. The others may still come, such as spares.
        self._known += [node for node in members if node in self._new]
        self._new = deque(node for node in self._new if node not in members)
        for node in members:
            self._nodes[node].silent_s = 0.0

    def mark_failure(self) -> None:
        """Count the heartbeats of each node anew, because a rank or node failed."""
        for liveness in self._nodes.values():
            liveness.num_changes = 0

    def all_alive_since_failure(self) -> bool:
        """Return whether every other node has sent two heartbeats since the failure.

        One heartbeat is not enough, because the node may have sent it before the failure.
        """
        return all(self._nodes[node].num_changes >= 2 for node in self._members if node)

    @property
    def silent_s(self) -> dict[int, float]:
        """The seconds since each other node of the attempt last sent a heartbeat, keyed by node."""
        return {node: self._nodes[node].silent_s for node in self._members if node}

    def update(self, now_s: float) -> None:
        """Read the heartbeats of all nodes. Call this every HEARTBEAT_INTERVAL_S."""
        passed_s = min(now_s - self._updated_at, 2 * HEARTBEAT_INTERVAL_S)
        self._updated_at = now_s
        statuses: list[RankStatus] = []
        values = self._read_heartbeats()
        for node, liveness in self._nodes.items():
            value = values.get(node, b"")
            if value != liveness.value:  # a heartbeat contains a time, so each one is different
                liveness.value, liveness.silent_s, liveness.is_lost = value, 0.0, False
                liveness.num_changes += 1
            # Node 0 runs this itself. A node without a heartbeat has not joined: the rendezvous limits the wait for it.
            elif node and value:
                liveness.silent_s += passed_s
            if liveness.silent_s > NODE_LOST_S and not liveness.is_lost:
                liveness.is_lost = True  # delete it once: a new ddprun may claim the number before its first heartbeat
                self._store.delete_key(f"claim/{node}")
            if self._attempt and value and not liveness.is_lost:  # before the first attempt, there are no ranks
                attempt, signs = stores.decode(f"beat/{node}", value, _read_heartbeat)
                statuses += signs if attempt == self._attempt else ()  # the node may not have begun this attempt
        self.statuses = tuple(statuses)
        steps = [status.step for status in statuses if status.step is not None]
        # The steps of ranks that have ended are in no heartbeat any more.
        self.step = max((*steps, *(() if self.step is None else (self.step,))), default=None)

    def _read_heartbeats(self) -> dict[int, bytes]:
        """Return the heartbeats by node, which takes one call, and one for each new node that has none yet."""
        for _ in range(min(len(self._new), MAX_NEW)):
            node = self._new.popleft()
            # Back to the end, so that each node has its turn. multi_get would wait for a key that does not exist.
            (self._known if self._store.check([f"beat/{node}"]) else self._new).append(node)
        keys = [f"beat/{node}" for node in self._known]
        return dict(zip(self._known, self._store.multi_get(keys), strict=True)) if keys else {}


class Consensus:
    """Reports how the ranks of this node end, and waits for node 0's decision. On node 0, it also decides."""

    def __init__(
        self,
        store: Store,
        config: NodeConfig,
        *,
        read_statuses: Callable[[], Sequence[RankStatus]],
        requeues: Requeues | None,
        describe_success: Callable[[], str],
        on_resumes: Callable[[Sequence[Resume]], None],
        history: Sequence[FailedAttempt],
    ) -> None:
        """Start the threads, which run until the process ends or node 0 is lost. Raises NodeError.

        ``read_statuses`` returns the statuses of this node's ranks. On node 0, ``on_resumes`` is called when all nodes
        have reported what their ranks resume from. ``history``: the attempts that failed under a previous node 0.
        """
        try:
            # A connection that waits for a key cannot be used for other calls.
            self._store, self._wait_store = store.clone(), store.clone()
        except stores.StoreError:
            raise store_lost_error() from None
        self._node, self._is_leader = config.node_rank, config.node_rank == 0
        limit, errors = config.max_restarts, config.restarts_errors
        self._decide_next = partial(restart_policy.decide, max_restarts=limit, restarts_errors=errors)
        self._hang_timeout_s, self._is_replaced = config.hang_timeout_s, config.replaces_node_0
        self._config = config
        self._read_statuses, self._requeues, self._describe_success = read_statuses, requeues, describe_success
        self._on_resumes = on_resumes
        # Updated on node 0 only. A spare sends heartbeats, too: a lost one must not be called.
        self._liveness = LivenessTracker(self._store, config.max_nodes + config.spares)
        # Pairs of an attempt and a report, which may be sent only when another attempt has begun.
        self._posts: queue.SimpleQueue[tuple[int, dict[str, object]]] = queue.SimpleQueue()
        self._posting = threading.Lock()  # for calls of _store, and the attempt that they are about
        self._wake = threading.Event()  # a new attempt has begun
        self._decided = threading.Event()
        self._num_loops = 0
        self._heartbeat_due = 0.0  # at once
        self.node_0_lost = False  # then its store is lost, too
        self._leaves = False  # whether this node was stopped and a new node replaces it
        self.history = [*history]  # all failed attempts; nodes other than node 0 keep them only if nodes are replaced
        self._step: int | None = None  # the highest step of this node's ranks in the attempt
        # _watch may find node 0 lost while another thread receives its decision: the first of both counts.
        self._deciding = threading.Lock()
        self._attempt = 0
        self._members: tuple[int, ...] = ()
        self.decision: Decision | None = None  # None while the attempt runs
        self._failures: list[Failure] = []
        self._exited: list[int] = []  # the ranks that exited with 0 before the first failure
        self._resumes: list[Resume] = []
        self._done: set[int] = set()  # the nodes whose ranks have all exited with 0
        self._num_posts = 0
        self._began_at = self._failed_at = 0.0
        # A late copy may lack what node 0 has added: compare_set with the expected value "" sets only a new key.
        if history:
            self._try_store(lambda: self._store.compare_set("history", "", self._encoded_history()))
        self._try_store(self._send_heartbeat)  # before the rendezvous, so that node 0 notices the loss of a member
        # Node 0 itself serves the store, so its calls do not hang.
        for run in (self._run, self._send_posts, *(() if self._is_leader else (self._watch,))):
            threading.Thread(target=run, name="consensus", daemon=True).start()

    def begin_attempt(self, attempt: int, members: tuple[int, ...]) -> None:
        """Start an attempt and forget the previous one."""
        with self._posting:
            self._attempt, self._members, self.decision = attempt, members, None
            self._failures, self._exited, self._done, self._num_posts, self._step = [], [], set(), 0, None
            self._resumes = []
            self._began_at = time.monotonic()
            self._decided.clear()
            self._liveness.begin_attempt(attempt, members)
        if self._is_replaced:  # a node that joins now has no history yet
            self._try_store(self._read_history)
        if self._leaves:  # the key belongs to an attempt, and the stop came before this one began
            self.post_leaving()
        if self.node_0_lost:  # the decision that says so was reset above
            self._mark_node_0_lost()
        self._wake.set()  # _run waits for it between attempts

    def wait(self, timeout_s: float) -> Decision | None:
        """Return the decision as soon as it is made, or None after ``timeout_s``."""
        self._decided.wait(timeout_s)
        return self.decision

    def post_failure(self, failure: Failure) -> None:
        """Report a failure on this node to node 0. Call this at once, because the order of failures matters."""
        # Like all reports, it is sent by a thread: the caller handles signals and exits, and must not wait for a store.
        self._posts.put((self._attempt, {"failure": asdict(failure)}))

    def post_success(self, rank: int, *, is_last: bool) -> None:
        """Report that a rank exited with 0. ``is_last``: whether all ranks of this node have now exited with 0."""
        self._posts.put((self._attempt, {"exited": rank, "done": self._node if is_last else None}))

    def post_resumes(self, resumes: Sequence[Resume]) -> None:
        """Report what the ranks of this node resume from."""
        self._posts.put((self._attempt, {"resumes": [*map(asdict, resumes)]}))

    def post_leaving(self) -> None:
        """Report, before the ranks end, that this node was stopped. Wait at most LEAVE_TIMEOUT_S for node 0."""
        self._leaves = True
        key = f"{self._attempt}/leaving/{self._node}"
        # In a thread, because the call may hang with node 0.
        posting = threading.Thread(target=lambda: self._try_store(lambda: self._store.set(key, "")), daemon=True)
        posting.start()
        posting.join(LEAVE_TIMEOUT_S)

    def post_gone(self) -> None:
        """Report that this node's ranks have ended, for which node 0 keeps the store. Call this after the decision."""
        self._try_store(lambda: self._store.add(f"{self._attempt}/gone", 1))

    def wait_until_all_gone(self, timeout_s: float) -> None:
        """On node 0, wait at most ``timeout_s`` until the ranks of all nodes that are alive have ended."""
        deadline = time.monotonic() + timeout_s
        # The shorter limit: the run has ended, and a wait for a node that is lost only delays the end of node 0.
        lost_after_s = restart_policy.NODE_LOST_AFTER_FAILURE_S
        while self._is_leader and time.monotonic() < deadline:
            with self._posting:
                num_gone = self._store.add(f"{self._attempt}/gone", 0)  # get would wait for a key that does not exist
                spares = spare_ends(self._store, self._config)  # without the store, a spare could not tell how it ended
                read = not spares or self._store.check(spares)  # whether the spares have read how the run ended
            silent = sum(seconds > lost_after_s for seconds in self._liveness.silent_s.values())
            if num_gone + silent >= len(self._members) and read:
                return
            time.sleep(POLL_S)

    def _send_posts(self) -> None:
        """Write the reports into the store, in their order. A run whose report is dropped would never end."""
        while not self.node_0_lost:
            attempt, post = self._posts.get()
            self._try_store(partial(self._post, attempt, post), timeout_s=-1)

    def _post(self, attempt: int, post: dict[str, object]) -> None:
        # Two calls, because nodes report at once: add gives each a number of its own.
        number = self._store.add(f"{attempt}/news", 1)  # readers wait for the report's own key, not for this number
        self._store.set(f"{attempt}/news/{number}", json.dumps(post))

    def _try_store(self, act: Callable[[], object], timeout_s: float = NODE_LOST_S) -> None:
        """Call ``act``, which uses the store. Do nothing if node 0 is lost, because node 0 serves the store.

        Do nothing, either, if other calls take longer than ``timeout_s``: they hang because node 0 does not answer, and
        ``act`` would hang, too. -1 means to wait for them.
        """
        if self.node_0_lost or not self._posting.acquire(timeout=timeout_s):
            return
        try:
            act()
        except stores.StoreError:
            self._mark_node_0_lost()
        finally:
            self._posting.release()

    def _mark_node_0_lost(self) -> None:
        self.node_0_lost = True  # first: it ends the threads, and calls that would hang
        failure = Failure(node=0, rank=None, status=-signal.SIGKILL)
        lost = outcome_of(failure, attempt=max(1, self._attempt))  # 1: no attempt has begun
        with self._deciding:
            if self.decision:
                return
            if self._is_replaced and self._attempt:  # before the first attempt, there is nothing to restart
                lost = replace(lost, message="node 0, which has the store of the run, was lost")
                lived_s = time.monotonic() - self._began_at
                # Only this node's step: those of other nodes were in node 0's store.
                self.history.append(FailedAttempt(outcome=lost, step=self._step, lived_s=lived_s))
                self._set_decision(self._decide_next(self.history))  # each node decides by its copy, as node 0 cannot
            else:
                hint = "" if self._config.spares else f"; {HINT}"
                self._set_decision(Decision(outcome=replace(lost, message=f"{lost.message}{hint}")))

    def _watch(self) -> None:
        """Detect that calls to the store hang because node 0 ended without closing its connections (power failure).

        Count the iterations of this loop instead of seconds, because this process may have been paused.
        """
        last, num_stalled = -1, 0  # -1: _run has no such number, so the first iteration is no stall
        while not self.node_0_lost:
            num_stalled = num_stalled + 1 if last == self._num_loops else 0
            last = self._num_loops
            if num_stalled * HEARTBEAT_INTERVAL_S > NODE_LOST_S:
                self._mark_node_0_lost()
            time.sleep(HEARTBEAT_INTERVAL_S)

    def _run(self) -> None:
        while not self.node_0_lost:
            self._num_loops += 1
            if time.monotonic() >= self._heartbeat_due:
                interval_s = HEARTBEAT_INTERVAL_S if self._attempt or self._is_leader else WAITING_INTERVAL_S
                self._heartbeat_due = time.monotonic() + interval_s
                self._try_store(self._send_heartbeat)
            # Never negative, even after a slow heartbeat: torch gives it to poll(2), which would wait without a limit.
            rest_s = max(0.001, self._heartbeat_due - time.monotonic())
            attempt = self._attempt
            if not attempt or self.decision:
                self._wake.wait(rest_s)  # no key is expected until the next attempt begins
                self._wake.clear()
                continue
            try:
                key = f"{attempt}/news/{self._num_posts + 1}" if self._is_leader else f"{attempt}/verdict"
                self._wait_store.wait([key], timedelta(seconds=rest_s))
            except DistNetworkError:  # the connection was closed: node 0 has ended
                self._mark_node_0_lost()
                return
            except DistStoreError:  # nothing new, but on node 0, SETTLE_S or a hang's limit may have passed
                if not self._is_leader:
                    continue
            if attempt == self._attempt:  # the agent may have begun another one during the wait
                self._try_store(self._decide if self._is_leader else self._receive_decision)

    def _send_heartbeat(self) -> None:
        statuses = [asdict(status) for status in self._read_statuses()]
        # _step keeps the steps of ranks that have ended, which have no status any more.
        steps = (self._step, *(status["step"] for status in statuses))
        self._step = max((step for step in steps if step is not None), default=None)
        beat = {"at": time.monotonic(), "attempt": self._attempt, "signs": statuses}
        self._store.set(f"beat/{self._node}", json.dumps(beat))
        if self._is_leader:
            self._liveness.update(time.monotonic())

    def _receive_decision(self) -> None:
        if self._store.check([key := f"{self._attempt}/verdict"]):  # get would wait for a key that does not exist
            decision = stores.decode(key, self._store.get(key), _read_decision)
            if self._is_replaced:  # now, because node 0 may be lost later: then this node needs the copy
                self._read_history()
            with self._deciding:
                self._set_decision(self.decision or decision)  # unless node 0 was found lost meanwhile

    def _read_history(self) -> None:
        if self._store.check(["history"]):
            history = stores.decode("history", self._store.get("history"), read_attempts)
            self.history = max(self.history, history, key=len)  # a node that has missed decisions has fewer

    def _encoded_history(self) -> str:
        return json.dumps([asdict(ended) for ended in self.history])

    def _leaving(self) -> tuple[int, ...]:
        members = self._members if self._is_replaced else ()  # else nobody takes its place: its failure stops the run
        return tuple(node for node in members if self._store.check([f"{self._attempt}/leaving/{node}"]))

    def _decide(self) -> None:
        self._read_posts()
        # A failure counts even then: a node may report one of its own, such as a disk that does not answer.
        if len(self._done) == len(self._members) and not self._failures:
            outcome = Outcome(code=0, cause="ok", message=self._describe_success(), attempt=self._attempt)
            self._publish(Decision(outcome=outcome))
            return
        # Exit codes in SETTLE_S are those of ranks that may follow from another failure. Only the first failure's code
        # counts: of failures with such codes, find_root_failure returns no later one.
        settled = self._liveness.all_alive_since_failure() and all(
            time.monotonic() - self._failed_at >= SETTLE_S.get(failure.code, 0.0) for failure in self._failures[:1]
        )
        silent_s = self._liveness.silent_s
        failure = restart_policy.find_root_failure(self._failures, silent_s=silent_s, settled=settled)
        failure = failure or self._find_hang()  # last: what has ended explains why others wait
        if failure and (not self._requeues or self._requeues.is_ready()):  # else in the next iteration: it asks a disk
            lived_s = time.monotonic() - self._began_at
            # A failure has the step at which its rank ended. A heartbeat may not have reported it.
            steps = [step for step in (self._liveness.step, *(f.step for f in self._failures)) if step is not None]
            outcome = outcome_of(failure, attempt=self._attempt, exited=self._exited)
            step, leaving = max(steps, default=None), self._leaving()
            if leaving:  # the stopped node explains the failures of ranks on other nodes
                outcome = restart_policy.outcome_of_leaving(leaving[0], step=step, attempt=self._attempt)
            self.history.append(FailedAttempt(outcome=outcome, step=step, lived_s=lived_s))
            decision = self._decide_next(self.history, leaves=bool(leaving))
            if self._is_replaced:  # before the decision, with which the other nodes read it
                self._store.set("history", self._encoded_history())
            for node in leaving if decision.restart else ():
                if node:  # so that a new node need not wait until this one counts as lost
                    self._store.delete_key(f"claim/{node}")
            # Call limit even before a restart, so that it asks the disk anew after the next failure.
            if self._requeues and (limited := self._requeues.limit(decision.outcome)) and not decision.restart:
                decision = Decision(outcome=limited)
            self._publish(decision)

    def _read_posts(self) -> None:
        while self._store.check([key := f"{self._attempt}/news/{self._num_posts + 1}"]):
            self._num_posts += 1
            post = stores.decode(key, self._store.get(key), _read_post)
            if isinstance(post, Failure):
                # It may follow from another failure or a lost node. So the decision waits until each node has answered
                # since now, by the clock of node 0, and SETTLE_S has passed (restart_policy.py).
                if not self._failures:
                    self._failed_at = time.monotonic()
                    self._liveness.mark_failure()
                self._failures.append(post)
                continue
            if isinstance(post, list):
                self._resumes += post
                if {resume.node for resume in self._resumes} == {*self._members}:  # only all ranks can be compared
                    self._on_resumes(self._resumes)
                continue
            rank, done = post
            if not self._failures:  # a later exit cannot have caused the failure
                self._exited.append(rank)
            if done is not None:
                self._done.add(done)

    def _find_hang(self) -> Failure | None:
        status = find_hung_rank(self._liveness.statuses, self._hang_timeout_s)
        if self._failures or status is None:  # after a failure, the peers wait for the rank that failed
            return None
        description = describe_hang(status, self._hang_timeout_s)
        # It is alive, and ddprun will end it with SIGKILL.
        return Failure(node=status.node, rank=status.rank, status=-signal.SIGKILL, step=status.step, hung=description)

    def _publish(self, decision: Decision) -> None:
        # The others first: this node's agent goes on as soon as it has the decision, and may end the store.
        self._store.set(f"{self._attempt}/verdict", json.dumps(asdict(decision)))
        if self._config.spares and not decision.restart:  # the spares wait for this key (spares.py)
            self._store.set("ended", json.dumps(asdict(decision.outcome)))
        self._set_decision(decision)

    def _set_decision(self, decision: Decision) -> None:
        self.decision = decision  # before the event, after which wait returns it
        self._decided.set()
