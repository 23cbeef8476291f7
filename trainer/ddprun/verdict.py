"""Which failure of many was the first, and what it means for the run. Pure.

A rank that dies takes its peers with it: a Python peer ends with 1 (a traceback about a closed connection), one inside
gloo or NCCL aborts with 134, ddptrain says 142. Such an exit may be an echo of something worse that is not known yet.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpwire.exits import Exit, of_status, worth_a_retry
from ddpwire.outcome import Outcome

# How long an echo waits for its cause: Python takes its time to exit. 142 is ddptrain's word for a lost peer.
SETTLE_S = {1: 0.5, 128 + signal.SIGABRT: 2.0, int(Exit.ABSENT): 0.5}
LOST_S = 4.0  # a node that has been silent for so long is lost,
LOST_AFTER_FAILURE_S = 3.0  # or for so long, when there is something to be explained
# The script's, or a library's, own fault: it would come again.
CRASHES = tuple(
    128 + number
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP)
)
STOPPED = {int(Exit.SAVED_TERM): "SIGTERM", int(Exit.SAVED_USR1): "SIGUSR1", int(Exit.INTERRUPTED): "SIGINT"}
RESTARTED = ("killed", "oom", "hang", "node_lost")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that ended otherwise than with 0, or hangs, or a node that was lost (``rank`` is None)."""

    node: int
    rank: int | None
    status: int  # subprocess' return code: 3, or -9 for SIGKILL
    stopped_by: int = 0  # the signal that this node had passed to its ranks before
    killed_here: bool = False  # its grace was over
    step: int | None = None
    stopped_for: int | None = None  # the rank that somebody told to stop, past every ddprun, and that had all stop
    oom: str = ""  # it was killed for memory: how much there is
    hung: str = ""  # it is alive, but hangs: how one sees that
    said: str = ""  # its own last word: ValueError: bad label 17

    @property
    def code(self) -> int:
        """The shell's code; that of the signal that asked for the stop when we had to kill."""
        if self.hung:
            return Exit.HUNG
        return 128 + self.stopped_by if self.killed_here else of_status(self.status)


def choose(failures: Sequence[Failure], *, silent_s: Mapping[int, float], settled: bool) -> Failure | None:
    """The failure that explains the others; None: it is too early to say, or there is none.

    ``failures`` stand in the order in which they happened. ``silent_s`` says how long nothing was heard of each node
    that has not finished, ``settled`` whether every node was heard of since the first failure.
    """
    own = next((failure for failure in failures if failure.code not in SETTLE_S), None)
    if own and (own.status < 0 or settled):  # who exits with a code of his own may have caught the loss of a node
        return own
    limit_s = LOST_AFTER_FAILURE_S if failures else LOST_S
    for node, seconds in sorted(silent_s.items()):
        if seconds > limit_s:
            return Failure(node=node, rank=None, status=-signal.SIGKILL)
    return failures[0] if failures and settled else None


def outcome_of(failure: Failure, *, attempt: int) -> Outcome:
    """What every node of the run says about ``failure``."""
    node: int | None = failure.node
    rank = failure.rank
    who = f"rank {rank} on node {failure.node}"
    how = f"was killed by {_name(-failure.status)}" if failure.status < 0 else f"exited with {failure.status}"
    message = f"{who} {how}"
    if failure.rank is None:
        cause, message = "node_lost", f"node {failure.node} was lost: its ddprun fell silent"
        if failure.node == 0:
            message = "node 0 was lost, and with it the store of the run: start the run again"
    elif failure.hung:
        cause, message = "hang", f"{who} hung: {failure.hung}"
    elif failure.killed_here:
        cause, message = "stopped", f"stopped by {_name(failure.stopped_by)}: {who} did not end in time and was killed"
    elif _was_asked(failure):
        cause, message = "stopped", f"stopped by {_name(failure.stopped_by)}: {message}"
    elif failure.status in STOPPED:
        cause, message = "stopped", f"{message}: it was told to stop by {STOPPED[failure.status]}, or stopped by itself"
        if failure.stopped_for is not None:
            node, rank = None if failure.stopped_for != rank else node, failure.stopped_for
            message = f"rank {rank} was told to stop by {STOPPED[failure.status]}, and all stopped with it"
    elif failure.oom:
        cause, message = (
            "oom",
            f"{who} was killed for memory: {failure.oom}; give the job more, or each rank less to do",
        )
    elif failure.status < 0:
        cause = "killed"
    else:
        cause, message = "error", f"{message}: {failure.said}" if failure.said else message
    return Outcome(
        code=failure.code,
        cause=cause,  # type: ignore[arg-type]  # each of them is a Cause
        message=message,
        node=node,
        rank=rank,
        step=failure.step,
        retry=worth_a_retry(failure.code) and failure.code not in CRASHES,
        attempt=attempt,
    )


def may_restart(outcome: Outcome) -> bool:
    """Whether the same ranks may do better next time: after what befell them, not after what they did themselves."""
    return outcome.cause in RESTARTED and outcome.code not in CRASHES


def _was_asked(failure: Failure) -> bool:
    """A rank that saved ends with 128 + signal, whichever of the stop signals it was told by."""
    return bool(failure.stopped_by) and failure.code in (
        128 + failure.stopped_by,
        *STOPPED,
    )


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
