"""Two ddpruns agree on the first failure and on the exit code."""

import json
import signal

from ddpwire.run_files import Outcome


def test_a_stop_of_one_node_ends_both_with_its_code(runs):
    first, second = runs.pair("act.py", "all=save")
    runs.wait_until_ready(first, second)
    second.process.send_signal(signal.SIGTERM)
    assert (first.end(), second.end()) == (143, 143)
    assert first.facts() == Outcome(code=143, cause="stopped", message="", node=1, rank=1, retry=True)
    assert second.outcome() == first.outcome()
    assert "SIGTERM" in first.outcome().message
    assert first.log(0) == "ready\nsaved on SIGTERM\n"


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


def test_a_new_pod_without_a_claim_waits_for_the_number_of_a_pod_that_still_runs(runs, monkeypatch, tmp_path):
    monkeypatch.setenv("DDP_NODE_REPLACED", "1")
    port = runs.free_port()
    first, second = runs.pair("act.py", "all=save", port=port)
    runs.wait_until_ready(first, second)
    own = {"DDP_RUN_DIR": str(tmp_path / "own")}
    runs.executed = True  # a fork would have the others' token, by which a store tells two ddpruns of a node apart
    new = runs.start("act.py", "all=save", node=1, nodes="2", port=port, env=own)
    runs.until(lambda: "another ddprun has the number of this node: it is alive" in new.stderr.read_text())
    assert [node.process.poll() for node in (first, second, new)] == [None] * 3
    second.process.send_signal(signal.SIGTERM)
    assert second.end() == 143
    state = tmp_path / "own/node-1/node.json"
    runs.until(lambda: json.loads(state.read_text())["state"] == "training")
    stop(first, new)


def stop(*nodes):
    for node in nodes:
        node.process.send_signal(signal.SIGTERM)
    assert {node.process.wait(60) for node in nodes} == {143}
