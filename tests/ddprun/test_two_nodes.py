"""Two ddpruns agree: on their ranks, on the first failure, on the exit code, on the next attempt."""

import signal
import time

import pytest

from ddpwire.outcome import Outcome

NEVER_AGAIN = ("--max-restarts", "0")


def test_four_ranks_of_two_nodes_meet_under_gloo(runs):
    first, second = runs.pair("gloo.py", nproc=2)
    assert (first.end(), second.end()) == (0, 0)
    assert sorted(first.stdout.read_text().splitlines()) == ["[node0 rank0] world 4: 4", "[node0 rank1] world 4: 4"]
    assert sorted(second.stdout.read_text().splitlines()) == ["[node1 rank2] world 4: 4", "[node1 rank3] world 4: 4"]
    done = Outcome(code=0, cause="ok", message="every rank exited with 0")
    assert (first.outcome(), second.outcome()) == (done, done)
    assert first.said() == ["[node0] ranks 0 to 1 of 4 started (attempt 1)"]


@pytest.mark.parametrize(("fail", "code"), [("1:3", 3), ("0:65", 65), ("1:-9", 137), ("0:1", 1)])
def test_a_rank_fails_while_the_others_sit_in_a_collective(runs, fail, code):
    """Its peers end with a traceback about a closed connection; nobody reports that."""
    rank = int(fail[0])
    first, second = runs.pair("gloo.py", "--fail", fail, "--steps", "1000", "--pause", "0.02", options=NEVER_AGAIN)
    assert (first.end(), second.end()) == (code, code)
    how = "was killed by SIGKILL" if code == 137 else f"exited with {code}"
    expected = Outcome(
        code=code,
        cause="killed" if code == 137 else "error",
        message=f"rank {rank} on node {rank} {how}",
        node=rank,
        rank=rank,
        retry=code == 137,
    )
    # With an exit of 1 any of the two may have been first: a rank that leaves breaks its peer's connection.
    if code == 1:
        assert first.outcome() == second.outcome()
        assert first.outcome().message in (expected.message, "rank 1 on node 1 exited with 1")
    else:
        assert (first.outcome(), second.outcome()) == (expected, expected)


def test_a_killed_rank_is_started_again_with_all_others_on_a_fresh_store(runs):
    first, second = runs.pair("gloo.py", "--fail", "1:-9", options=("--max-restarts", "1"))
    assert (first.end(), second.end()) == (0, 0)
    assert first.outcome() == Outcome(code=0, cause="ok", message="every rank exited with 0", attempt=2)
    assert first.said() == [
        "[node0] rank 0 of 2 started (attempt 1)",
        "[node0] attempt 1 failed: rank 1 on node 1 was killed by SIGKILL; starting all ranks anew",
        "[node0] rank 0 of 2 started (attempt 2)",
    ]


def test_a_stop_of_one_node_ends_both_with_its_code(runs):
    first, second = runs.pair("act.py", "all=save")
    runs.wait_until_ready(first, second)
    second.process.send_signal(signal.SIGTERM)
    assert (first.end(), second.end()) == (143, 143)
    expected = Outcome(
        code=143,
        cause="stopped",
        message="stopped by SIGTERM: rank 1 on node 1 exited with 143",
        node=1,
        rank=1,
        retry=True,
    )
    assert (first.outcome(), second.outcome()) == (expected, expected)
    assert first.log(0) == "ready\nsaved on SIGTERM\n"


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_is_named_by_the_other(runs, lost):
    nodes = runs.pair("act.py", "all=family", options=NEVER_AGAIN)
    runs.wait_until_ready(*nodes)
    nodes[lost].process.kill()
    other = nodes[1 - lost]
    killed_at = time.monotonic()
    assert other.end() == 137
    assert time.monotonic() - killed_at < 8
    assert other.outcome() == Outcome(
        code=137,
        cause="node_lost",
        message=(
            f"node {lost} was lost: its ddprun fell silent"
            if lost
            else "node 0 was lost, and with it the store of the run: start the run again"
        ),
        node=lost,
        retry=True,
    )
    assert runs.nothing_is_left()


def test_a_node_that_does_not_come_is_named(runs):
    node = runs.start("act.py", nodes="2", port=runs.free_port(), options=("--join-timeout", "1"))
    assert node.end() == 142
    assert node.said() == [
        "[node0] node 1 of 2 did not come within 1 s (exit code 142; logs in RUN/node-0)",
    ]
    assert node.outcome().cause == "absent"


def test_a_master_that_does_not_come_is_named(runs):
    port = runs.free_port()
    node = runs.start("act.py", node=1, nodes="2", port=port, options=("--join-timeout", "1"))
    assert node.end() == 142
    assert node.said() == [
        f"[node1] node 0 of 2 did not come within 1 s (node-1 (127.0.0.1): 127.0.0.1:{port} refused the connection: "
        "nothing listens there yet, and it is this machine itself) "
        "(exit code 142; logs in RUN/node-1)"
    ]


def test_a_master_without_an_address_is_named(runs):
    options = ("--master-addr", "name.invalid")
    node = runs.start("act.py", node=1, nodes="2", port=runs.free_port(), options=options)
    assert node.end() == 69
    assert node.outcome().message.rpartition(":")[0] == "node-1: name.invalid does not resolve"


def test_a_job_that_may_shrink_begins_with_those_who_came(runs):
    node = runs.start("act.py", "all=0", nodes="1:2", port=runs.free_port(), options=("--join-timeout", "1"))
    assert node.end() == 0
    assert node.said() == ["[node0] rank 0 of 1 started (attempt 1)"]


def test_two_nodes_with_one_rank_are_refused_by_name(runs, tmp_path):
    port = runs.free_port()
    third = {"env": {"DDP_RUN_DIR": str(tmp_path / "other")}}
    options = ("--join-timeout", "8")
    one = runs.start("act.py", "all=0", node=1, nodes="3", port=port, options=options)
    other = runs.start("act.py", "all=0", node=1, nodes="3", port=port, options=options, **third)
    first = runs.start("act.py", "all=0", node=0, nodes="3", port=port, options=options)
    codes = sorted((one.end(), other.end()))
    assert codes == [78, 142]
    refused = one if one.end() == 78 else other
    assert refused.said()[-1].startswith("[node1] another node says that it is node 1: give each its own --node-rank")
    assert first.end() == 142
    assert first.outcome().message == "node 2 of 3 did not come within 8 s"


def test_a_node_of_another_run_is_refused(runs):
    port = runs.free_port()
    options = ("--join-timeout", "8", "--run-id")
    second = runs.start("act.py", node=1, nodes="2", port=port, options=(*options, "b"))
    first = runs.start("act.py", node=0, nodes="2", port=port, options=(*options, "a"))
    assert second.end() == 78
    assert second.outcome().message == "the run id of node 1 is b, but node 0's is a"
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 143
