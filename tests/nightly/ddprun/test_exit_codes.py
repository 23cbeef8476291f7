"""The codes come out of both nodes of two as they went in on one, whichever that is; with one outcome."""

import os
import signal

import pytest
from tests.contract.ddprun.test_exit_codes import ended


@pytest.mark.parametrize(("code", "node"), [(65, 1), (78, 0)])
def test_the_exit_code_of_a_script_is_that_of_both_nodes(runs, code, node):
    assert ended(*runs.pair("act.py", f"{node}={code}")) == (code, "error", node, node)


@pytest.mark.parametrize(("number", "code", "node"), [(signal.SIGTERM, 143, 0)])
def test_ranks_that_save_on_a_signal_end_both_nodes_with_its_code(runs, number, code, node):
    """SIGTERM to node 1: test_two_nodes.py."""
    nodes = runs.pair("act.py", "all=save")
    runs.wait_until_ready(*nodes)
    nodes[node].process.send_signal(number)
    assert ended(*nodes) == (code, "stopped", node, node)


def test_ranks_that_succeed_end_both_nodes_with_0(runs):
    assert ended(*runs.pair("act.py", "all=0")) == (0, "ok", None, None)


def test_a_killed_rank_ends_both_nodes_with_137(runs):
    """Of node 1: test_two_nodes.py."""
    nodes = runs.pair("act.py", "0=-9", options=("--max-restarts", "0"))
    assert ended(*nodes) == (137, "killed", 0, 0)


def test_a_hang_ends_both_nodes_with_144(runs):
    """Of node 1: test_restarts.py."""
    nodes = runs.pair("steps.py", "--steps", "100000", options=("--max-restarts", "0", "--hang-timeout", "1"))
    runs.until(lambda: (runs.run_dir / "steps" / "1.5.0").exists())
    os.kill(nodes[0].rank_pid(0), signal.SIGSTOP)
    assert ended(*nodes) == (144, "hang", 0, 0)
