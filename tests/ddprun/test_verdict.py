"""Which of many failures was the first."""

import signal

import pytest

from ddprun.verdict import Failure, choose, may_restart, outcome_of
from ddpwire.outcome import Outcome

KILLED = Failure(node=0, rank=1, status=-9)
TRACEBACK = Failure(node=1, rank=2, status=1)
ABORTED = Failure(node=1, rank=3, status=-6)
LEFT_ALONE = Failure(node=0, rank=0, status=142)  # what ddptrain says of a lost peer
OWN_CODE = Failure(node=0, rank=0, status=3)
ALIVE = {0: 0.1, 1: 0.2}


@pytest.mark.parametrize(
    ("failures", "silent_s", "settled", "chosen"),
    [
        ([], ALIVE, False, None),
        ([KILLED, TRACEBACK], ALIVE, False, KILLED),
        ([TRACEBACK, ABORTED, KILLED], ALIVE, False, KILLED),
        ([TRACEBACK, ABORTED], ALIVE, False, None),
        ([TRACEBACK, ABORTED], ALIVE, True, TRACEBACK),
        ([TRACEBACK, LEFT_ALONE], ALIVE, True, TRACEBACK),
        ([LEFT_ALONE, KILLED], ALIVE, True, KILLED),
        ([TRACEBACK], {0: 0.1, 1: 3.5}, False, Failure(node=1, rank=None, status=-9)),
        ([], {0: 0.1, 1: 3.5}, False, None),
        ([], {0: 0.1, 1: 4.5}, False, Failure(node=1, rank=None, status=-9)),
        ([OWN_CODE, KILLED], ALIVE, True, OWN_CODE),
        ([OWN_CODE], ALIVE, False, None),
        ([TRACEBACK, OWN_CODE], ALIVE, True, OWN_CODE),
        ([OWN_CODE], {0: 0.1, 1: 3.5}, False, Failure(node=1, rank=None, status=-9)),
    ],
)
def test_choose(failures, silent_s, settled, chosen):
    assert choose(failures, silent_s=silent_s, settled=settled) == chosen


@pytest.mark.parametrize(
    ("failure", "code", "cause", "message", "retry"),
    [
        (TRACEBACK, 1, "error", "rank 2 on node 1 exited with 1", False),
        (
            Failure(node=1, rank=2, status=1, said="ValueError: bad 17"),
            1,
            "error",
            "rank 2 on node 1 exited with 1: ValueError: bad 17",
            False,
        ),
        (
            Failure(node=0, rank=0, status=143, stopped_by=signal.SIGTERM, said="ddptrain: lost the other ranks"),
            143,
            "stopped",
            "stopped by SIGTERM: rank 0 on node 0 exited with 143",
            True,
        ),
        (
            Failure(node=0, rank=2, status=143, stopped_for=2),
            143,
            "stopped",
            "rank 2 was told to stop by SIGTERM, and all stopped with it",
            True,
        ),
        (
            Failure(node=0, rank=1, status=138),
            138,
            "stopped",
            "rank 1 on node 0 exited with 138: it was told to stop by SIGUSR1, or stopped by itself",
            True,
        ),
        (KILLED, 137, "killed", "rank 1 on node 0 was killed by SIGKILL", True),
        (ABORTED, 134, "killed", "rank 3 on node 1 was killed by SIGABRT", True),
        (
            Failure(node=0, rank=0, status=-15, stopped_by=signal.SIGTERM),
            143,
            "stopped",
            "stopped by SIGTERM: rank 0 on node 0 was killed by SIGTERM",
            True,
        ),
        (
            Failure(node=0, rank=0, status=130, stopped_by=signal.SIGINT),
            130,
            "stopped",
            "stopped by SIGINT: rank 0 on node 0 exited with 130",
            False,
        ),
        (
            Failure(node=0, rank=0, status=3, stopped_by=signal.SIGTERM),
            3,
            "error",
            "rank 0 on node 0 exited with 3",
            False,
        ),
        (
            Failure(node=0, rank=0, status=-9, stopped_by=signal.SIGTERM, killed_here=True),
            143,
            "stopped",
            "stopped by SIGTERM: rank 0 on node 0 did not end in time and was killed",
            True,
        ),
        (
            Failure(node=0, rank=0, status=-11),
            139,
            "killed",
            "rank 0 on node 0 was killed by SIGSEGV",
            False,
        ),
        (
            Failure(node=0, rank=1, status=-9, oom="its cgroup has 2 GiB"),
            137,
            "oom",
            "rank 1 on node 0 was killed for memory: its cgroup has 2 GiB; give the job more, or each rank less to do",
            True,
        ),
        (
            Failure(node=0, rank=1, status=-9, hung="no sign of life"),
            144,
            "hang",
            "rank 1 on node 0 hung: no sign of life",
            True,
        ),
        (
            Failure(node=0, rank=None, status=-9),
            137,
            "node_lost",
            "node 0 was lost, and with it the store of the run: start the run again",
            True,
        ),
        (
            Failure(node=2, rank=None, status=-9),
            137,
            "node_lost",
            "node 2 was lost: its ddprun fell silent",
            True,
        ),
    ],
)
def test_outcome(failure, code, cause, message, retry):
    expected = Outcome(
        code=code, cause=cause, message=message, node=failure.node, rank=failure.rank, retry=retry, attempt=2
    )
    assert outcome_of(failure, attempt=2) == expected


def test_a_rank_that_stopped_with_another_is_not_named():
    told = outcome_of(Failure(node=0, rank=0, status=138, stopped_for=3), attempt=1)
    message = "rank 3 was told to stop by SIGUSR1, and all stopped with it"
    assert (told.node, told.rank, told.message) == (None, 3, message)


@pytest.mark.parametrize(
    ("code", "cause", "again"),
    [
        (1, "error", False),
        (255, "error", False),
        (78, "error", False),
        (143, "stopped", False),
        (139, "killed", False),
        (135, "killed", False),
        (134, "killed", True),
        (137, "killed", True),
        (137, "oom", True),
        (137, "node_lost", True),
        (144, "hang", True),
    ],
)
def test_restart(code, cause, again):
    assert may_restart(Outcome(code=code, cause=cause, message="")) is again
