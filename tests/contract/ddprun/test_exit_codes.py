"""The codes come out of both nodes of two as they went in on one, whichever that is; with one outcome."""

import os
import signal

import pytest

NODES = pytest.mark.parametrize("node", [0, 1])


def ended(*nodes):
    """The code, the cause, the node and the rank of the one outcome of both nodes."""
    codes = {node.end() for node in nodes}
    outcomes = {node.outcome() for node in nodes}
    assert (len(codes), len(outcomes)) == (1, 1), (codes, outcomes)
    outcome = outcomes.pop()
    assert outcome.code == codes.pop()
    return outcome.code, outcome.cause, outcome.node, outcome.rank


def test_0(runs):
    assert ended(*runs.pair("act.py", "all=0")) == (0, "ok", None, None)


@pytest.mark.parametrize(("code", "node"), [(3, 0), (65, 1), (78, 0), (142, 1)])
def test_a_scripts_own(runs, code, node):
    assert ended(*runs.pair("act.py", f"{node}={code}")) == (code, "error", node, node)


@pytest.mark.parametrize("program", [["gone.py"], ["-m", "gone_entirely.part"]], ids=["script", "module"])
def test_66(runs, program, tmp_path):
    node = runs.start("act.py", options=tuple(program), cwd=tmp_path)
    assert node.end() == 66
    assert (node.outcome().code, node.outcome().cause) == (66, "config")
    assert program[-1] in node.outcome().message
    assert node.stderr.read_text() == f"ddprun: {node.outcome().message}\n"  # torch was not imported


@NODES
def test_66_of_one_node_does_not_keep_the_other_waiting(runs, node, tmp_path):
    folders = [tmp_path / "with", tmp_path / "without"][:: 1 if node else -1]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "with/only_here.py").write_text("")
    port = runs.free_port()
    options = ("--join-timeout", "200", "-m", "only_here")
    nodes = [
        runs.start("act.py", node=number, nodes="2", port=port, options=options, cwd=folder)
        for number, folder in enumerate(folders)
    ]
    assert nodes[node].end() == 66
    assert nodes[1 - node].end() == 66


def test_137(runs):
    """Of node 1: test_two_nodes.py."""
    nodes = runs.pair("act.py", "0=-9", options=("--max-restarts", "0"))
    assert ended(*nodes) == (137, "killed", 0, 0)


@pytest.mark.parametrize(
    ("number", "code", "node"), [(signal.SIGUSR1, 138, 1), (signal.SIGTERM, 143, 0)], ids=["usr1-1", "term-0"]
)
def test_saved(runs, number, code, node):
    """SIGTERM to node 1: test_two_nodes.py."""
    nodes = runs.pair("act.py", "all=save")
    runs.wait_until_ready(*nodes)
    nodes[node].process.send_signal(number)
    assert ended(*nodes) == (code, "stopped", node, node)


def test_144(runs):
    """Of node 1: test_restarts.py."""
    nodes = runs.pair("steps.py", "--steps", "100000", options=("--max-restarts", "0", "--hang-timeout", "1"))
    runs.until(lambda: (runs.run_dir / "steps" / "1.5.0").exists())
    os.kill(nodes[0].rank_pid(0), signal.SIGSTOP)
    assert ended(*nodes) == (144, "hang", 0, 0)
