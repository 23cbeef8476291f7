"""Two ddpruns agree: on their ranks, on the first failure, on the exit code, on the next attempt."""

import signal

import pytest

from ddpwire.run_files import Outcome

NEVER_AGAIN = ("--max-restarts", "0")


def test_a_stop_of_one_node_ends_both_with_its_code(runs):
    first, second = runs.pair("act.py", "all=save")
    runs.wait_until_ready(first, second)
    second.process.send_signal(signal.SIGTERM)
    assert (first.end(), second.end()) == (143, 143)
    assert first.facts() == Outcome(code=143, cause="stopped", message="", node=1, rank=1, retry=True)
    assert second.outcome() == first.outcome()
    assert "SIGTERM" in first.outcome().message
    assert first.log(0) == "ready\nsaved on SIGTERM\n"


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_stop_of_a_node_that_is_replaced_ends_it_alone(runs, leaver, monkeypatch):
    """As when a pod is deleted; then the job is."""
    monkeypatch.setenv("DDP_NODE_REPLACED", "1")
    nodes = runs.pair("act.py", "all=save")
    runs.wait_until_ready(*nodes)
    other = nodes[1 - leaver]
    nodes[leaver].process.send_signal(signal.SIGTERM)
    assert nodes[leaver].end() == 143
    expected = Outcome(code=143, cause="stopped", message="", node=leaver, retry=True)
    assert nodes[leaver].facts() == expected
    assert "SIGTERM" in nodes[leaver].outcome().message
    runs.until(lambda: other.state().state == "rendezvous")
    assert other.log(1 - leaver) == "ready\nsaved on SIGTERM\n"
    other.process.send_signal(signal.SIGTERM)
    assert other.end() == 143
    assert runs.nothing_is_left()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_is_named_by_the_other(runs, lost):
    nodes = runs.pair("act.py", "all=family", options=NEVER_AGAIN)
    runs.wait_until_ready(*nodes)
    nodes[lost].process.kill()
    other = nodes[1 - lost]
    assert other.end() == 137
    assert other.facts() == Outcome(code=137, cause="node_lost", message="", node=lost, retry=True)
    assert runs.nothing_is_left()


@pytest.mark.parametrize("wrong", ["--nproc-per-node=abc", "--local-addr=192.0.2.200"], ids=["setting", "address"])
def test_a_node_that_does_not_begin_tells_node_0_why(runs, wrong):
    port = runs.free_port()
    first = runs.start("act.py", nodes="2", port=port)
    second = runs.start("act.py", node=1, nodes="2", port=port, options=(wrong,))
    assert (first.end(), second.end()) == (78, 78)
    assert first.facts() == Outcome(code=78, cause="config", message="", node=1)
    assert first.outcome().message.partition(" begin: ")[2] in second.stderr.read_text()
    assert wrong.partition("=")[2] in first.outcome().message


def test_a_node_that_does_not_come_is_named(runs):
    node = runs.start("act.py", nodes="2", port=runs.free_port(), options=("--join-timeout", "1"))
    assert node.end() == 142
    assert node.outcome().cause == "absent"
    assert "node 1 of 2" in node.outcome().message


def test_a_node_of_another_run_is_refused(runs):
    port = runs.free_port()
    options = ("--join-timeout", "8", "--run-id")
    second = runs.start("act.py", node=1, nodes="2", port=port, options=(*options, "b"))
    first = runs.start("act.py", node=0, nodes="2", port=port, options=(*options, "a"))
    assert second.end() == 78
    assert second.outcome().cause == "config"
    assert "'b' on node 1, but 'a' on node 0" in second.outcome().message
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 143
