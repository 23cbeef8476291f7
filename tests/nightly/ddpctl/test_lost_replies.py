"""A launch whose reply is lost: how its run is found, and when its record is deleted."""

import pytest
from tests.unit.ddpctl import test_lost_replies

from ddpctl.command import UNREACHED, Output


@pytest.mark.parametrize(
    ("sent", "is_lost"),
    [
        (Output(returncode=UNREACHED, stderr="the connection was lost"), True),
        (Output(returncode=-9), True),
        (Output(returncode=1, stderr="sbatch: error: Batch job submission failed: Invalid account\n"), False),
    ],
    ids=["connection", "killed", "refused"],
)
def test_only_some_errors_of_sbatch_may_have_submitted_the_job(sent, is_lost):
    test_lost_replies.test_only_some_errors_of_sbatch_may_have_submitted_the_job(sent, is_lost)


@pytest.mark.parametrize(
    ("answers", "nodes", "state", "hosts", "is_whole"),
    [
        (("", "0\n"), "1:2", "exists", [1, 0], True),
        (("0\n", None), "1:2", "unknown", None, True),
    ],
    ids=["elastic", "elastic-silent"],
)
def test_a_run_on_hosts_is_located_by_its_claims(answers, nodes, state, hosts, is_whole):
    test_lost_replies.test_a_run_on_hosts_is_located_by_its_claims(answers, nodes, state, hosts, is_whole)
