"""Two ddpruns agree on the first failure and on the exit code."""

import signal

import pytest

from ddpwire.run_files import Outcome


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_stop_of_one_node_ends_both_with_its_code(runs, number):
    """Also a Ctrl-C: ddpctl signals each host by itself, so the nodes get it at different times."""
    nodes = runs.pair("act.py", "all=save")
    runs.wait_until_ready(*nodes)
    nodes[1].process.send_signal(number)
    assert [node.end() for node in nodes] == [128 + number] * 2
    retry, first = number != signal.SIGINT, nodes[0]
    assert first.facts() == Outcome(code=128 + number, cause="stopped", message="", node=1, rank=1, retry=retry)
    assert nodes[1].outcome() == first.outcome()
    assert number.name in first.outcome().message
    assert [node.log(rank) for rank, node in enumerate(nodes)] == [f"ready\nsaved on {number.name}\n"] * 2


def test_a_stop_of_a_node_that_is_replaced_ends_it_alone(runs, monkeypatch):
    """As when a pod is deleted; then the job is."""
    monkeypatch.setenv("DDP_NODE_REPLACED", "1")
    first, second = runs.pair("act.py", "all=save")
    runs.wait_until_ready(first, second)
    second.process.send_signal(signal.SIGTERM)
    assert second.end() == 143
    assert second.facts() == Outcome(code=143, cause="stopped", message="", node=1, retry=True)
    assert "SIGTERM" in second.outcome().message
    runs.until(lambda: first.state().state == "rendezvous")
    assert first.log(0) == "ready\nsaved on SIGTERM\n"
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 143
    assert runs.remaining() == []


def test_a_lost_node_is_named_by_the_other(runs):
    first, second = runs.pair("act.py", "all=family", options=("--max-restarts", "0"))
    runs.wait_until_ready(first, second)
    second.process.kill()
    assert first.end() == 137
    assert first.facts() == Outcome(code=137, cause="node_lost", message="", node=1, retry=True)
    assert runs.remaining() == []


def test_a_new_pod_waits_for_the_folder_of_a_pod_that_still_runs(runs, monkeypatch):
    """Its machine is cut off from Kubernetes, and the run's folder is on a claim."""
    monkeypatch.setenv("DDP_NODE_REPLACED", "1")
    port = runs.free_port()
    first, second = runs.pair("act.py", "all=save", port=port)
    runs.wait_until_ready(first, second)
    new = runs.start("act.py", "all=save", node=1, nodes="2", port=port)
    runs.until(lambda: "another ddprun uses" in new.stderr.read_text())
    assert [node.process.poll() for node in (first, second, new)] == [None] * 3
    second.process.send_signal(signal.SIGTERM)
    assert second.end() == 143
    runs.until(lambda: new.state().pid == new.process.pid and new.state().state == "training")
    stop(first, new)


def stop(*nodes):
    for node in nodes:
        node.process.send_signal(signal.SIGTERM)
    assert {node.process.wait(60) for node in nodes} == {143}
