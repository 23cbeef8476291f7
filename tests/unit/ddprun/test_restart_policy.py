"""Which of many failures was the first."""

import signal
from dataclasses import replace

import pytest

from ddprun.system.restart_policy import Failure, find_root_failure, may_restart, outcome_of, pod_exit_code
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
def test_the_root_failure_of_several(failures, silent_s, settled, chosen):
    assert find_root_failure(failures, silent_s=silent_s, settled=settled) == chosen


def failure(status, *, node=0, rank=0, **facts):
    return Failure(node=node, rank=rank, status=status, **facts)


TERM, INT = {"stopped_by": signal.SIGTERM}, {"stopped_by": signal.SIGINT}
LAUNCHER_ENDED = "the ddpctl process that started the run has ended"


@pytest.mark.parametrize(
    ("failed", "code", "cause", "retry", "named"),
    [
        (TRACEBACK, 1, "error", False, "rank 2 on node 1"),
        (failure(137, rank=None, setup="node_setup failed: 'a' exited with 9"), 137, "setup", False, "exited with 9"),
        (failure(1, error="ValueError: bad 17"), 1, "error", False, "ValueError: bad 17"),
        (failure(143, **TERM, error="ddptrain: lost the other ranks"), 143, "stopped", True, "SIGTERM"),
        (failure(143, rank=2, stopped_for=2), 143, "stopped", True, "rank 2"),
        (failure(138, rank=1), 138, "stopped", True, "SIGUSR1"),
        (KILLED, 137, "killed", True, "SIGKILL"),
        (failure(137, error="ddptrain: a worker process ended"), 137, "killed", True, "a worker process ended"),
        (ABORTED, 134, "killed", True, "SIGABRT"),
        (failure(-15, **TERM), 143, "stopped", True, "SIGTERM"),
        (failure(130, **INT), 130, "stopped", False, "SIGINT"),
        *((failure(status, **INT), 130, "stopped", False, "SIGINT") for status in (0, 1, 3, -2)),
        (failure(-9, **INT, killed_here=True, stopped_again=True), 137, "stopped", True, "SIGINT"),
        (failure(-9, **INT, killed_here=True), 130, "stopped", False, "SIGINT"),  # after its grace
        (failure(3, **TERM, error="OSError: disk full"), 3, "stopped", False, "OSError: disk full"),
        (failure(3, stopped_by=signal.SIGUSR1), 3, "error", False, "rank 0 on node 0"),
        (failure(-9, **TERM, killed_here=True), 143, "stopped", True, "rank 0 on node 0"),
        (failure(0, **TERM), 143, "stopped", True, "SIGTERM"),
        (failure(143, **TERM, stop_reason=LAUNCHER_ENDED), 143, "stopped", True, LAUNCHER_ENDED),
        (failure(-15, rank=None, **TERM, unstarted=True), 143, "stopped", True, "SIGTERM"),
        (failure(-11), 139, "killed", False, "SIGSEGV"),
        (failure(-9, rank=1, oom="the limit of its cgroup is 2 GiB"), 137, "oom", True, "2 GiB"),
        (failure(-9, rank=1, hung="no heartbeat"), 144, "hang", True, "no heartbeat"),
        (failure(-9, rank=None), 137, "node_lost", True, "node 0"),
        (failure(-9, node=2, rank=None), 137, "node_lost", True, "node 2"),
    ],
)
def test_a_failure_becomes_an_outcome(failed, code, cause, retry, named):
    outcome = outcome_of(failed, attempt=2)
    expected = Outcome(code=code, cause=cause, message="", node=failed.node, rank=failed.rank, retry=retry, attempt=2)
    assert replace(outcome, message="") == expected
    assert named in outcome.message


def test_ranks_that_had_exited_with_0_are_named_if_they_may_be_the_cause():
    hung = Failure(node=0, rank=0, status=-9, hung="no heartbeat for 300 s")
    for failed, exited, named in (
        (TRACEBACK, [1], "rank 1"),
        (ABORTED, [5, 0, 4, 7], "0, 4, 5 and 7"),
        (hung, [1], "rank 1"),
    ):
        outcome = outcome_of(failed, attempt=1, exited=exited)
        assert replace(outcome, message="") == replace(outcome_of(failed, attempt=1), message="")
        assert named in outcome.message
    for failed in (KILLED, OWN_CODE, replace(TRACEBACK, stopped_by=signal.SIGTERM)):
        assert outcome_of(failed, attempt=1, exited=[1]) == outcome_of(failed, attempt=1)


def test_a_rank_that_stopped_with_another_is_not_named():
    outcome = outcome_of(Failure(node=0, rank=0, status=138, stopped_for=3), attempt=1)
    assert (outcome.node, outcome.rank) == (None, 3)
    assert "rank 3" in outcome.message
    assert "SIGUSR1" in outcome.message


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
def test_a_cause_decides_whether_a_run_may_restart(code, cause, again):
    assert may_restart(Outcome(code=code, cause=cause, message="")) is again


@pytest.mark.parametrize(
    ("code", "cause", "retry", "expected"),
    [
        (0, "success", False, 0),
        (3, "error", False, 3),
        (75, "gave_up", False, 75),
        (139, "killed", False, 75),
        (200, "error", True, 75),  # the script's own code
        (137, "oom", False, 75),
        (137, "killed", True, 75),  # ddprun may not restart the ranks any more
        (144, "hang", True, 75),
        (130, "stopped", False, 75),
        (143, "stopped", True, 143),
        (137, "node_lost", True, 137),
        (142, "absent", True, 142),
    ],
)
def test_a_pod_ends_with_128_or_more_only_if_a_new_pod_may_help(code, cause, retry, expected):
    assert pod_exit_code(Outcome(code=code, cause=cause, message="", retry=retry)) == expected
