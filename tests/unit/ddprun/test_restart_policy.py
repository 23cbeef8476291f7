"""Which of many failures was the first."""

import signal
from dataclasses import replace

import pytest

from ddprun.restart_policy import Failure, find_root_failure, may_restart, outcome_of
from ddpwire.run_files import Outcome

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
    assert find_root_failure(failures, silent_s=silent_s, settled=settled) == chosen


@pytest.mark.parametrize(
    ("failure", "code", "cause", "retry"),
    [
        pytest.param(TRACEBACK, 1, "error", False, id="exit-1"),
        pytest.param(
            Failure(node=1, rank=2, status=1, error="ValueError: bad 17"), 1, "error", False, id="exit-1-with-error"
        ),
        pytest.param(
            Failure(node=0, rank=0, status=143, stopped_by=signal.SIGTERM, error="ddptrain: lost the other ranks"),
            143,
            "stopped",
            True,
            id="stopped-by-sigterm",
        ),
        pytest.param(
            Failure(node=0, rank=2, status=143, stopped_for=2), 143, "stopped", True, id="stopped-with-another-rank"
        ),
        pytest.param(Failure(node=0, rank=1, status=138), 138, "stopped", True, id="exit-138"),
        pytest.param(KILLED, 137, "killed", True, id="sigkill"),
        pytest.param(
            Failure(
                node=1, rank=3, status=137, error="ddptrain: a worker process that reads images ended unexpectedly"
            ),
            137,
            "killed",
            True,
            id="exit-137",
        ),
        pytest.param(ABORTED, 134, "killed", True, id="sigabrt"),
        pytest.param(
            Failure(node=0, rank=0, status=-15, stopped_by=signal.SIGTERM),
            143,
            "stopped",
            True,
            id="killed-by-the-stop",
        ),
        pytest.param(
            Failure(node=0, rank=0, status=130, stopped_by=signal.SIGINT), 130, "stopped", False, id="interrupted"
        ),
        *(
            pytest.param(
                Failure(node=0, rank=0, status=status, stopped_by=signal.SIGINT),
                130,
                "stopped",
                False,
                id=f"interrupted-{status}",
            )
            for status in (0, 1, 3, -2)
        ),
        pytest.param(
            Failure(node=0, rank=0, status=-9, stopped_by=signal.SIGINT, killed_here=True, stopped_again=True),
            137,
            "stopped",
            True,
            id="interrupted-twice",
        ),
        pytest.param(
            Failure(node=0, rank=0, status=-9, stopped_by=signal.SIGINT, killed_here=True),
            130,
            "stopped",
            False,
            id="interrupted-and-killed-after-its-grace",
        ),
        pytest.param(
            Failure(node=0, rank=0, status=3, stopped_by=signal.SIGTERM, error="OSError: disk full"),
            3,
            "stopped",
            False,
            id="own-code-after-a-stop",
        ),
        pytest.param(
            Failure(node=0, rank=0, status=3, stopped_by=signal.SIGUSR1), 3, "error", False, id="own-code-after-usr1"
        ),
        pytest.param(
            Failure(node=0, rank=0, status=-9, stopped_by=signal.SIGTERM, killed_here=True),
            143,
            "stopped",
            True,
            id="killed-after-its-grace",
        ),
        pytest.param(
            Failure(node=0, rank=0, status=0, stopped_by=signal.SIGTERM), 143, "stopped", True, id="0-after-a-stop"
        ),
        pytest.param(
            Failure(
                node=0,
                rank=0,
                status=143,
                stopped_by=signal.SIGTERM,
                stop_reason="the ddpctl process that started the run has ended",
            ),
            143,
            "stopped",
            True,
            id="stopped-without-a-signal",
        ),
        pytest.param(
            Failure(node=0, rank=None, status=-15, stopped_by=signal.SIGTERM, unstarted=True),
            143,
            "stopped",
            True,
            id="stopped-before-the-start",
        ),
        pytest.param(Failure(node=0, rank=0, status=-11), 139, "killed", False, id="sigsegv"),
        pytest.param(
            Failure(node=0, rank=1, status=-9, oom="the limit of its cgroup is 2 GiB"), 137, "oom", True, id="oom"
        ),
        pytest.param(Failure(node=0, rank=1, status=-9, hung="no heartbeat"), 144, "hang", True, id="hang"),
        pytest.param(Failure(node=0, rank=None, status=-9), 137, "node_lost", True, id="node-0-lost"),
        pytest.param(Failure(node=2, rank=None, status=-9), 137, "node_lost", True, id="node-2-lost"),
    ],
)
def test_outcome(wording, failure, code, cause, retry):
    outcome = outcome_of(failure, attempt=2)
    expected = Outcome(code=code, cause=cause, message="", node=failure.node, rank=failure.rank, retry=retry, attempt=2)
    assert replace(outcome, message="") == expected
    wording(outcome.message)


def test_ranks_that_had_exited_with_0_are_named_if_they_may_be_the_cause(wording):
    hung = Failure(node=0, rank=0, status=-9, hung="no heartbeat for 300 s")
    for failure, exited in ((TRACEBACK, [1]), (ABORTED, [5, 0, 4, 7]), (hung, [1])):
        outcome = outcome_of(failure, attempt=1, exited=exited)
        assert replace(outcome, message="") == replace(outcome_of(failure, attempt=1), message="")
        wording(outcome.message)
    for failure in (KILLED, OWN_CODE, replace(TRACEBACK, stopped_by=signal.SIGTERM)):
        assert outcome_of(failure, attempt=1, exited=[1]) == outcome_of(failure, attempt=1)


def test_a_rank_that_stopped_with_another_is_not_named(wording):
    outcome = outcome_of(Failure(node=0, rank=0, status=138, stopped_for=3), attempt=1)
    assert (outcome.node, outcome.rank) == (None, 3)
    wording(outcome.message)


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
