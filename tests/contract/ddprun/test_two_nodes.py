"""Two ddpruns agree on the first failure and on the exit code."""

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
