"""The restart policy: which of several failures came first, its outcome, and whether to restart the ranks. Pure.

A rank that ends makes its peers fail too. A peer exits with 1 after a traceback about a closed connection, or with 142
if it runs ddptrain. If gloo or NCCL aborts the peer, its exit code is 134. So an exit with such a code may have a cause
that node 0 does not know yet. The cause may also be a rank that exited with 0 while its peers still trained.

The policy limits only the number of attempts in a row without progress. As long as the training advances, preemptions
and lost nodes may occur any number of times. An attempt makes progress if a rank reports a higher step than in
all previous attempts. If the ranks send no heartbeats, the attempt makes progress if they live for MIN_LIFETIME_S. Node
0 decides, and all nodes follow.
"""

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddpwire.exits import Exit, of_status, worth_a_retry
from ddpwire.machine import enumerate_ranges
from ddpwire.run_files import Outcome, read_outcome

# How many seconds to wait for the cause after these exit codes, because Python takes time to exit.
SETTLE_S = {1: 0.5, 128 + signal.SIGABRT: 2.0, int(Exit.ABSENT): 0.5}
NODE_LOST_S = 4.0  # a node is lost if it has been silent for this long
NODE_LOST_AFTER_FAILURE_S = 3.0  # the same, after a rank has failed

# Crashes are the fault of the script or a library, so they would happen again.
CRASH_CODES = tuple(
    128 + number
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP)
)
STOP_CODES = {
    int(Exit.SAVED_TERM): "SIGTERM",
    int(Exit.SAVED_USR1): "SIGUSR1",
    int(Exit.SAVED_USR2): "SIGUSR2",
    int(Exit.INTERRUPTED): "SIGINT",
}
_ONLY_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # not SIGUSR1 and 2, which the script itself may use
EXTERNAL_CAUSES = ("killed", "oom", "hang", "node_lost")
NEVER_AGAIN = (Exit.DATA, Exit.NO_INPUT, Exit.CONFIG)  # what no restart can fix
MAX_WITHOUT_PROGRESS = 3  # the number of attempts without progress after which a run gives up
MIN_LIFETIME_S = 60.0  # living longer counts as progress of a script without heartbeats


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure, hang or stop of a rank.

    If ``rank`` is None, a node was lost, or was stopped before it had ranks.
    """

    node: int
    rank: int | None
    status: int  # subprocess' return code: 3, or -9 for SIGKILL
    stopped_by: int = 0  # the signal that this node had sent to its ranks before
    stop_reason: str = ""  # why ddprun itself stopped its ranks, if it did
    unstarted: bool = False  # the node was stopped before it had ranks (``rank`` is None)
    killed_here: bool = False  # ddprun killed the rank after its grace period, or on a second signal
    stopped_again: bool = False  # there was a second signal
    step: int | None = None
    stopped_for: int | None = None  # the rank that received a stop signal directly and made all ranks stop
    oom: str = ""  # if the rank was killed for lack of memory: how much there is
    hung: str = ""  # if it is alive but hangs: the symptoms
    setup: str = ""  # if node_setup failed on the node (``rank`` is None): the command and the reason
    refused: str = ""  # if it is alive and ddprun ends it: the reason
    error: str = ""  # the error that it reported, such as ValueError: bad label 17

    @property
    def code(self) -> int:
        """Return the exit code as a shell shows it, such as 137 for SIGKILL.

        After a stop, return the code of the stop signal if ddprun killed the rank, or if the rank exited with 0. After
        Ctrl-C, return 130, or 137 if a second Ctrl-C killed the rank.
        """
        if self.hung:
            return Exit.HUNG
        if self.stopped_by == signal.SIGINT:
            return Exit.KILLED if self.killed_here and self.stopped_again else Exit.INTERRUPTED
        return 128 + self.stopped_by if self.killed_here or not self.status else of_status(self.status)


def find_root_failure(failures: Sequence[Failure], *, silent_s: Mapping[int, float], settled: bool) -> Failure | None:
    """Return the failure that caused the others, or None if nothing failed or the cause is not known yet.

    ``failures`` are in the order in which they happened. ``silent_s`` has, for every node except this one, the seconds
    for which that node has been silent. ``settled`` is set if every node has responded since the first failure, and
    SETTLE_S has passed.
    """
    own = next((failure for failure in failures if failure.code not in SETTLE_S), None)
    if own and (own.status < 0 or settled):  # a rank with another exit code may have noticed the loss of a node
        return own
    limit_s = NODE_LOST_AFTER_FAILURE_S if failures else NODE_LOST_S
    for node, seconds in sorted(silent_s.items()):
        if seconds > limit_s:
            return Failure(node=node, rank=None, status=-signal.SIGKILL)
    return failures[0] if failures and settled else None


def outcome_of(failure: Failure, *, attempt: int, exited: Sequence[int] = ()) -> Outcome:
    """Return the outcome of ``failure`` for all nodes.

    ``exited`` are the ranks that had exited with 0 before the failure.
    """
    node: int | None = failure.node
    rank = failure.rank
    who = f"rank {rank} on node {failure.node}"
    # The ranks that exited with 0 may have made this rank fail, but this is not certain.
    may_follow = bool(exited) and not failure.stopped_by and (failure.hung or failure.code in SETTLE_S)
    ranks = f"rank{'s' * (len(exited) > 1)} {enumerate_ranges(exited)}"
    after = f", after {ranks} had exited with 0" if may_follow else ""
    how = f"was killed by {_signal_name(-failure.status)}" if failure.status < 0 else f"exited with {failure.status}"
    message = f"{who} {how}{after}"
    stopped = describe_stop(failure.stopped_by, failure.stop_reason, failure.status)
    if failure.rank is None and not (failure.unstarted or failure.setup):
        cause, message = "node_lost", f"node {failure.node} was lost: its ddprun stopped responding"
        if failure.node == 0:
            message = "node 0, which has the store of the run, was lost: start the run again"
    elif failure.hung or failure.refused or failure.setup:
        cause = "hang" if failure.hung else "setup" if failure.setup else "error"
        message = (
            f"{who} hung{after}: {failure.hung}" if failure.hung else f"{who} was stopped{after}: {failure.refused}"
        )
        message = f"node {failure.node}: {failure.setup}" if failure.setup else message
    elif failure.unstarted:
        cause, message = "stopped", f"{stopped} before the ranks had started"
    elif failure.killed_here:
        how = "was killed by a second signal" if failure.stopped_again else "did not end in time and was killed"
        cause, message = "stopped", f"{stopped}; {who} {how}"
    elif _was_requested(failure):
        ending = f"; {who} then {how}: {failure.error}" if failure.error else f"; {who} then {how}"
        cause, message = "stopped", stopped if of_status(failure.status) in (0, *STOP_CODES) else f"{stopped}{ending}"
    elif failure.status in STOP_CODES:
        cause, message = "stopped", f"{message}: it received {STOP_CODES[failure.status]}, or chose this exit code"
        if failure.stopped_for is not None:
            node, rank = None if failure.stopped_for != rank else node, failure.stopped_for
            message = f"rank {rank} received {STOP_CODES[failure.status]}, and all ranks stopped"
    elif failure.oom:
        advice = "give the job more memory, or each rank less work"
        cause, message = "oom", f"{who} ran out of memory and was killed{after}: {failure.oom}; {advice}"
    else:  # 137 says, as in a shell, that a process below the rank was killed
        cause = "killed" if failure.status < 0 or failure.status == Exit.KILLED else "error"
        message = f"{message}: {failure.error}" if failure.error else message
    return Outcome(
        code=failure.code,
        cause=cause,  # type: ignore[arg-type]  # each of them is a Cause
        message=message,
        node=node,
        rank=rank,
        step=failure.step,
        retry=not failure.setup and worth_a_retry(failure.code) and failure.code not in CRASH_CODES,
        attempt=attempt,
    )


def describe_stop(number: int, reason: str = "", status: int = 0) -> str:
    """Describe why a node was stopped: by the signal ``number``, or by ddprun itself for ``reason``.

    If the ``status`` of a rank shows that ``--stop-signal`` replaced SIGTERM, also name the signal that the ranks got.
    """
    replaced = number == signal.SIGTERM and status in (Exit.SAVED_USR1, Exit.SAVED_USR2)
    sent = f", with {STOP_CODES[status]} to the ranks" if replaced else ""
    return f"stopped because {reason}{sent}" if reason else f"stopped by {_signal_name(number)}{sent}"


def outcome_of_leaving(node: int, *, step: int | None, attempt: int) -> Outcome:
    """Return the outcome of an attempt that ended because ``node`` was stopped and a new node takes its place."""
    return Outcome(
        code=Exit.SAVED_TERM,
        cause="stopped",
        message=f"node {node} was stopped by SIGTERM",
        node=node,
        step=step,
        retry=True,
        attempt=attempt,
    )


def may_restart(outcome: Outcome, *, leaves: bool = False) -> bool:
    """Return whether another attempt may succeed. ``leaves``: whether a new node replaces a node that was stopped."""
    causes = (*EXTERNAL_CAUSES, "stopped") if leaves else EXTERNAL_CAUSES
    return outcome.cause in causes and outcome.code not in CRASH_CODES


def pod_exit_code(outcome: Outcome) -> int:
    """Return the exit code of ddprun in a pod. It is 128 or more only if a new pod may help.

    After such a code, a PyTorchJob replaces the pod, and the number of these replacements has no limit.
    """
    helps = outcome.retry and outcome.cause in ("stopped", "node_lost", "absent")
    return outcome.code if helps or outcome.code < 128 else Exit.GAVE_UP


def _was_requested(failure: Failure) -> bool:
    """Return whether the rank ended because of a stop request: its exit code says so, or it failed after the signal."""
    stop = failure.stopped_by
    return bool(stop) and (failure.code in (128 + stop, *STOP_CODES) or (failure.status > 0 and stop in _ONLY_STOPS))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, kw_only=True)
class FailedAttempt:
    """An attempt that failed."""

    outcome: Outcome
    step: int | None  # the highest in any rank's heartbeat, or None without heartbeats
    lived_s: float


def read_attempts(values: Any) -> list[FailedAttempt]:
    """Return the attempts in ``values``, which come from JSON."""
    return [FailedAttempt(**value | {"outcome": read_outcome(json.dumps(value["outcome"]))}) for value in values]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How an attempt ended, and whether there is another attempt."""

    outcome: Outcome
    restart: bool = False


def decide(
    attempts: Sequence[FailedAttempt], *, max_restarts: int, restarts_errors: bool = False, leaves: bool = False
) -> Decision:
    """Decide what follows the last failure. ``attempts`` are all attempts of the run.

    If ``restarts_errors`` is set, restart as torchrun does: at most ``max_restarts`` times, after any cause except a
    stop, and after any exit code except NEVER_AGAIN. ``leaves``: see ``may_restart``.
    """
    outcome = attempts[-1].outcome
    if restarts_errors:
        again = may_restart(outcome, leaves=leaves) or outcome.cause in (*EXTERNAL_CAUSES, "error")
        again = again and outcome.code not in NEVER_AGAIN
        return Decision(outcome=outcome, restart=again and len(attempts) <= max_restarts)
    if not may_restart(outcome, leaves=leaves):
        return Decision(outcome=outcome)
    # Another process may have used up the memory, once.
    if outcome.cause == "oom" and sum(attempt.outcome.cause == "oom" for attempt in attempts) > 1:
        return Decision(outcome=replace(outcome, message=f"{outcome.message}. A restart did not help", retry=False))
    without_progress = attempts[len(attempts) - num_without_progress(attempts) :]
    if len(attempts) > 1 and len(without_progress) >= MAX_WITHOUT_PROGRESS:
        ends = "; ".join(f"attempt {ended.outcome.attempt}: {ended.outcome.message}" for ended in without_progress)
        message = f"gave up after {len(without_progress)} attempts without progress ({ends})"
        return Decision(outcome=replace(outcome, code=Exit.GAVE_UP, cause="gave_up", message=message, retry=False))
    return Decision(outcome=outcome, restart=len(attempts) <= max_restarts)


def num_without_progress(attempts: Sequence[FailedAttempt]) -> int:
    """Return how many attempts have failed since the last attempt with progress."""
    best, number = -1, 0
    for attempt in attempts:
        progress = attempt.lived_s > MIN_LIFETIME_S if attempt.step is None else attempt.step > best
        best = max(best, best if attempt.step is None else attempt.step)
        number = 0 if progress else number + 1
    return number
