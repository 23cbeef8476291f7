"""Further rows of the root failure and of the progress; a machine without cgroups."""

import pytest
from tests.unit.ddprun import test_restart_policy
from tests.unit.ddprun.test_restart_policy import (
    ABORTED,
    ALIVE,
    ERROR,
    KILLED,
    LEFT_ALONE,
    OOM,
    OWN_CODE,
    TRACEBACK,
    attempts,
    sign,
)

from ddprun.ranks.termination import OomMonitor
from ddprun.system.restart_policy import Failure


@pytest.mark.parametrize(
    ("failures", "silent_s", "settled", "chosen"),
    [
        ([TRACEBACK, ABORTED], ALIVE, True, TRACEBACK),
        ([TRACEBACK, LEFT_ALONE], ALIVE, True, TRACEBACK),
        ([], {0: 0.1, 1: 3.5}, False, None),
        ([OWN_CODE, KILLED], ALIVE, True, OWN_CODE),
        ([OWN_CODE], {0: 0.1, 1: 3.5}, False, Failure(node=1, rank=None, status=-9)),
    ],
)
def test_the_root_failure_of_several(failures, silent_s, settled, chosen):
    test_restart_policy.test_the_root_failure_of_several(failures, silent_s, settled, chosen)


@pytest.mark.parametrize(
    ("ended", "restart"),
    [
        (attempts(None, None), True),
        (attempts(7, 7, 5, 8), True),
        (attempts(7, 7, 5, 8, 8, 8), True),
        (attempts(1, outcome=ERROR), False),
        ([*attempts(1, outcome=OOM), *attempts(2)], True),
        (attempts(7, 7, 5, 7), False),
        (attempts(*range(50)), True),
    ],
)
def test_a_run_restarts_while_it_makes_progress(ended, restart):
    test_restart_policy.test_a_run_restarts_while_it_makes_progress(ended, restart)


def test_a_machine_without_cgroups_reports_no_kill(tmp_path):
    assert not OomMonitor(root=tmp_path, own=tmp_path / "own").killed()
    assert "GiB" not in OomMonitor(root=tmp_path, own=tmp_path / "own").limit()


@pytest.mark.parametrize(
    ("code", "cause", "again"),
    [
        (255, "error", False),
        (135, "killed", False),
        (137, "killed", True),
        (137, "node_lost", True),
    ],
)
def test_a_cause_decides_whether_a_run_may_restart(code, cause, again):
    test_restart_policy.test_a_cause_decides_whether_a_run_may_restart(code, cause, again)


@pytest.mark.parametrize(
    ("code", "cause", "retry", "expected"),
    [
        (75, "gave_up", False, 75),
        (137, "oom", False, 75),
        (130, "stopped", False, 75),
        (137, "node_lost", True, 137),
    ],
)
def test_a_pod_ends_with_128_or_more_only_if_a_new_pod_may_help(code, cause, retry, expected):
    test_restart_policy.test_a_pod_ends_with_128_or_more_only_if_a_new_pod_may_help(code, cause, retry, expected)


@pytest.mark.parametrize(
    ("signs", "who"),
    [
        ([sign(0, None), sign(1, None)], None),  # they may be compiling
        ([sign(0, 5, 0.1), sign(1, None, stopped=True)], 1),
        ([sign(0, 5, busy=True), sign(1, 5)], 1),
        ([sign(0, 5), sign(1, 5), sign(2, 5, busy=True)], 2),
    ],
)
def test_the_rank_that_hangs_is_told_by_its_step_and_cpu_time(signs, who):
    test_restart_policy.test_the_rank_that_hangs_is_told_by_its_step_and_cpu_time(signs, who)


@pytest.mark.parametrize(
    ("line", "folder", "counter", "limit"),
    [
        pytest.param(
            "4:memory:/not/visible/here",
            "memory",
            "memory.oom_control",
            "memory.limit_in_bytes",
            id="v1-of-another-namespace",
        ),
    ],
)
def test_a_kill_for_memory_is_seen_once(tmp_path, line, folder, counter, limit):
    test_restart_policy.test_a_kill_for_memory_is_seen_once(tmp_path, line, folder, counter, limit)
