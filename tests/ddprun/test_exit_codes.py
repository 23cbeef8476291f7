"""The codes come out of both nodes of two as they went in on one, whichever that is; with one outcome."""

import os
import signal

import pytest

pytestmark = pytest.mark.slow

NODES = pytest.mark.parametrize("node", [0, 1])


def ended(*nodes):
    """The code of both nodes, and what both say of it."""
    codes = {node.end() for node in nodes}
    outcomes = {node.outcome() for node in nodes}
    assert (len(codes), len(outcomes)) == (1, 1), (codes, outcomes)
    outcome = outcomes.pop()
    assert outcome.code == codes.pop()
    return outcome.code, outcome.cause, outcome.node, outcome.message


def test_0(runs):
    assert ended(*runs.pair("act.py", "all=0")) == (0, "ok", None, "every rank exited with 0")


@NODES
@pytest.mark.parametrize("code", [3, 65, 78, 142])
def test_a_scripts_own(runs, code, node):
    nodes = runs.pair("act.py", f"{node}={code}")
    assert ended(*nodes) == (code, "error", node, f"rank {node} on node {node} exited with {code}")


@NODES
def test_137(runs, node):
    nodes = runs.pair("act.py", f"{node}=-9", options=("--max-restarts", "0"))
    assert ended(*nodes) == (137, "killed", node, f"rank {node} on node {node} was killed by SIGKILL")


@NODES
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 138), (signal.SIGTERM, 143)])
def test_saved(runs, number, code, node):
    nodes = runs.pair("act.py", "all=save")
    runs.wait_until_ready(*nodes)
    nodes[node].process.send_signal(number)
    message = f"stopped by {number.name}: rank {node} on node {node} exited with {code}"
    assert ended(*nodes) == (code, "stopped", node, message)


@NODES
def test_144(runs, node):
    nodes = runs.pair("steps.py", "--steps", "100000", options=("--max-restarts", "0", "--hang-timeout", "1"))
    runs.until(lambda: (runs.run_dir / "steps" / f"1.5.{node}").exists())
    os.kill(nodes[node].state().ranks[0].pid, signal.SIGSTOP)
    code, cause, where, message = ended(*nodes)
    assert (code, cause, where) == (144, "hang", node)
    assert message.startswith(f"rank {node} on node {node} hung: no sign of life for ")
