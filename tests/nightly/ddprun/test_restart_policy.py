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
    ],
)
def test_a_run_restarts_while_it_makes_progress(ended, restart):
    test_restart_policy.test_a_run_restarts_while_it_makes_progress(ended, restart)


def test_a_machine_without_cgroups_reports_no_kill(tmp_path):
    assert not OomMonitor(root=tmp_path, own=tmp_path / "own").killed()
    assert "GiB" not in OomMonitor(root=tmp_path, own=tmp_path / "own").limit()
