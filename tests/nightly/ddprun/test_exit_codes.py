"""The codes come out of both nodes of two as they went in on one, whichever that is; with one outcome."""

import signal

import pytest


def ended(*nodes):
    """The code, the cause, the node and the rank of the one outcome of both nodes."""
    codes = {node.end() for node in nodes}
    outcomes = {node.outcome() for node in nodes}
    assert (len(codes), len(outcomes)) == (1, 1), (codes, outcomes)
    outcome = outcomes.pop()
    assert outcome.code == codes.pop()
    return outcome.code, outcome.cause, outcome.node, outcome.rank


@pytest.mark.parametrize(("code", "node"), [(65, 1), (78, 0)])
def test_a_scripts_own(runs, code, node):
    assert ended(*runs.pair("act.py", f"{node}={code}")) == (code, "error", node, node)


@pytest.mark.parametrize(("number", "code", "node"), [(signal.SIGTERM, 143, 0)])
def test_saved(runs, number, code, node):
    """SIGTERM to node 1: test_two_nodes.py."""
    nodes = runs.pair("act.py", "all=save")
    runs.wait_until_ready(*nodes)
    nodes[node].process.send_signal(number)
    assert ended(*nodes) == (code, "stopped", node, node)
