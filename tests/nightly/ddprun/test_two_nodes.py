"""Two ddpruns agree: on their ranks, on the first failure, on the exit code, on the next attempt."""

import json
import signal

import pytest
from tests.contract.ddprun.test_exit_codes import stop

from ddpwire.run_files import Outcome

NEVER_AGAIN = ("--max-restarts", "0")


def test_four_ranks_of_two_nodes_meet_under_gloo(runs):
    first, second = runs.pair("gloo.py", local_world_size=2)
    assert (first.end(), second.end()) == (0, 0)
    assert sorted(first.stdout.read_text().splitlines()) == ["[node0 rank0] world 4: 4", "[node0 rank1] world 4: 4"]
    assert sorted(second.stdout.read_text().splitlines()) == ["[node1 rank2] world 4: 4", "[node1 rank3] world 4: 4"]
    assert first.facts() == Outcome(code=0, cause="ok", message="")
    assert second.outcome() == first.outcome()
    assert len(first.messages()) == 1


@pytest.mark.parametrize(("fail", "code"), [("1:3", 3), ("0:65", 65), ("1:-9", 137), ("0:1", 1)])
def test_a_rank_fails_while_the_others_wait_in_a_collective(runs, fail, code):
    """Its peers end with a traceback about a closed connection; nobody reports that."""
    rank = int(fail[0])
    first, second = runs.pair("gloo.py", "--fail", fail, "--steps", "1000", "--pause", "0.02", options=NEVER_AGAIN)
    assert (first.end(), second.end()) == (code, code)
    outcome = first.outcome()
    assert second.outcome() == outcome
    # With an exit of 1 any of the two may have been first: a rank that leaves breaks its peer's connection.
    assert outcome.rank == rank or (code == 1 and outcome.rank == 1)
    cause = "killed" if code == 137 else "error"
    expected = Outcome(code=code, cause=cause, message="", node=outcome.rank, rank=outcome.rank, retry=code == 137)
    assert first.facts() == expected


def test_a_killed_rank_is_started_again_with_all_others_on_a_fresh_store(runs):
    first, second = runs.pair("gloo.py", "--fail", "1:-9", options=("--max-restarts", "1"))
    assert (first.end(), second.end()) == (0, 0)
    assert first.facts() == Outcome(code=0, cause="ok", message="", attempt=2)
    assert ["rank 1 on node 1" in line for line in first.messages()] == [False, True, False]


def test_a_master_that_does_not_come_is_named(runs):
    port = runs.free_port()
    node = runs.start("act.py", node=1, nodes="2", port=port, options=("--join-timeout", "1"))
    assert node.end() == 142
    assert node.outcome().cause == "absent"
    assert f"127.0.0.1:{port}" in node.outcome().message


def test_a_master_without_an_address_is_named(runs):
    options = ("--master-addr", "name.invalid")
    node = runs.start("act.py", node=1, nodes="2", port=runs.free_port(), options=options)
    assert node.end() == 69
    assert node.outcome().cause == "unavailable"
    assert "'name.invalid'" in node.outcome().message


def test_a_job_that_may_shrink_begins_with_the_nodes_that_came(runs):
    node = runs.start("act.py", "all=0", nodes="1:2", port=runs.free_port(), options=("--join-timeout", "1"))
    assert node.end() == 0
    assert "rank 0 of 1" in node.messages()[-1]


def test_two_nodes_with_one_rank_are_refused_by_name(runs, tmp_path):
    port = runs.free_port()
    third = {"env": {"DDP_RUN_DIR": str(tmp_path / "other")}}
    options = ("--join-timeout", "8")
    first_of_two = runs.start("act.py", "all=0", node=1, nodes="3", port=port, options=options)
    second_of_two = runs.start("act.py", "all=0", node=1, nodes="3", port=port, options=options, **third)
    first = runs.start("act.py", "all=0", node=0, nodes="3", port=port, options=options)
    codes = sorted((first_of_two.end(), second_of_two.end()))
    assert codes == [78, 142]
    refused = first_of_two if first_of_two.end() == 78 else second_of_two
    assert "--node-rank" in refused.messages()[-1]
    assert first.end() == 142
    assert "node 2 of 3" in first.outcome().message


@pytest.mark.parametrize("leaver", [0])
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
    assert runs.remaining() == []


@pytest.mark.parametrize("lost", [0])
def test_a_lost_node_is_named_by_the_other(runs, lost):
    nodes = runs.pair("act.py", "all=family", options=NEVER_AGAIN)
    runs.wait_until_ready(*nodes)
    nodes[lost].process.kill()
    other = nodes[1 - lost]
    assert other.end() == 137
    assert other.facts() == Outcome(code=137, cause="node_lost", message="", node=lost, retry=True)
    assert runs.remaining() == []


@pytest.mark.parametrize("wrong", ["--local-addr=192.0.2.200"])
def test_a_node_that_does_not_begin_tells_node_0_why(runs, wrong):
    port = runs.free_port()
    first = runs.start("act.py", nodes="2", port=port)
    second = runs.start("act.py", node=1, nodes="2", port=port, options=(wrong,))
    assert (first.end(), second.end()) == (78, 78)
    assert first.facts() == Outcome(code=78, cause="config", message="", node=1)
    assert first.outcome().message.partition(" begin: ")[2] in second.stderr.read_text()
    assert wrong.partition("=")[2] in first.outcome().message


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
