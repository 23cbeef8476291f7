"""Evidence that is ambiguous, and variants of the causes that explain names."""

from typing import Any

import pytest
from tests.messages import assert_names
from tests.unit.ddpctl.test_explain import (
    BEFORE,
    IN_LOADER,
    IN_SCRIPT,
    NOW,
    TORCH,
    WAITS,
    check_names,
    entered,
    explained,
    facts,
    linked,
    rank,
    steps,
)

from ddpctl.diagnosis.explain import (
    explain_outcome,
    explain_ranks,
    explain_software,
)
from ddpctl.diagnosis.rank_view import read_answer
from ddpwire.run_files import Outcome


def test_collectives_may_have_other_sizes_on_each_rank():
    every = [[*BEFORE, entered(8, NOW - 40, op="all_to_all", size=size, done=False)] for size in (6, 9)]
    explanation = explained(rank(0, every[0]), rank(1, every[1]), rank(2, BEFORE, IN_SCRIPT, wchan="hrtimer_nanosleep"))
    assert facts(explanation) == ("missing", 2, True)


def test_a_rank_that_is_last_and_delays_nobody_is_not_called_slow():
    early, late = ([entered(seq, NOW - 6 + 0.1 * seq + lag) for seq in range(1, 61)] for lag in (0.0, 0.01))
    explanation = explained(rank(0, early, IN_SCRIPT, state="R"), rank(1, late, IN_SCRIPT, state="R"))
    assert facts(explanation) == ("none", None, False)
    check_names(explanation, "rank 1", "60 of 60", "dataset.py:88 (read)")


def test_sizes_that_differed_before_the_collective_that_hangs_are_a_mismatch():
    """One rank has a batch more: its last bucket meets the other's metric, and the barrier after that hangs."""
    fewer = [*BEFORE, entered(8, NOW - 59.2, size=1), entered(9, NOW - 59.1, op="barrier", done=False)]
    explanation = explained(rank(0, [*BEFORE, entered(8, NOW - 59.2, size=5)], IN_SCRIPT), rank(1, fewer))
    assert (explanation.cause, explanation.fault) == ("mismatch", True)
    check_names(explanation, "all_reduce #8", "Float [5]", "Float [1]", "rank 0", "rank 1", "batches")


def test_the_root_of_a_chain_of_waits_is_named():
    pair = [*BEFORE, entered(1, NOW - 40, group="1", done=False)]
    root = [*BEFORE, entered(0, NOW - 59, group="1")]
    assert facts(explained(rank(0, WAITS), rank(1, pair), rank(2, root, IN_SCRIPT))) == ("missing", 2, True)


def test_clocks_that_differ_make_no_straggler():
    ranks = (rank(0, steps(0)), rank(1, steps(0.001)), rank(2, steps(0, clock_s=0.1)), rank(3, steps(0, clock_s=0.1)))
    assert facts(explained(*ranks, clocks=(0.0, 0.1)))[0] == "unknown"


def test_a_link_that_is_slow_is_named():
    now = [*BEFORE, entered(8, NOW - 0.5, done=False)]
    ranks = [linked(rank(0, now), ["0A", "0B", 90, 1]), rank(1, now), linked(rank(2, now), ["0B", "0A", 0, 0])]
    explanation = explained(*ranks, rank(3, now))
    assert facts(explanation) == ("network", None, False)
    check_names(explanation, "node 0 and node 1", "ddpctl bench", "bf16 1.9 times", "powersgd:4", "diloco:32")
    assert facts(explained(linked(ranks[0], ["0A", "0B", 0, 0]), *ranks[1:], rank(3, now)))[0] != "network"


def test_a_rank_that_is_not_blocked_is_a_wait_and_no_fault():
    evaluates = rank(1, BEFORE, IN_SCRIPT, state="R")
    evaluates["samples"][0]["threads"] = [[["/home/me/dataset.py", 91, "read"], *IN_SCRIPT[1:]]]
    explanation = explained(rank(0, WAITS), evaluates)
    assert facts(explanation) == ("missing", 1, False)
    check_names(explanation, "rank 1 (node 0)", "all_reduce #8", "40 s", "dataset.py:88 (read)")
    wakes = rank(1, BEFORE, IN_SCRIPT)
    for number, sample in enumerate(wakes["samples"]):
        sample["switches"] = 100 * number
    assert facts(explained(rank(0, WAITS), wakes)) == ("missing", 1, False)
    polls = rank(1, BEFORE, IN_LOADER)  # a stalled loader wakes up now and then
    polls["samples"][0]["threads"] = [[["/usr/lib/python3.11/selectors.py", 4, "select"], *IN_LOADER]]
    assert facts(explained(rank(0, WAITS), polls)) == ("data_loader", 1, True)


def test_a_rank_outside_of_send_and_recv_is_named_only_if_it_is_the_only_one():
    def receives(number: int) -> Any:
        return rank(number, BEFORE, [[f"{TORCH}distributed/distributed_c10d.py", 9, "recv"], *IN_SCRIPT])

    explanation = explained(*map(receives, range(4)))
    assert facts(explanation) == ("send_recv", None, False)
    check_names(explanation, "send", "recv")
    sender = rank(1, BEFORE, IN_SCRIPT, wchan="hrtimer_nanosleep")
    explanation = explained(receives(0), sender, receives(2), receives(3))
    assert facts(explanation) == ("missing", 1, False)
    check_names(explanation, "rank 1 (node 0)", "dataset.py:88 (read)")
    assert explained(receives(0), sender, sender | {"rank": 2}, receives(3)).rank is None


def test_a_slow_node_is_named_if_its_ranks_are_last_by_turns():
    def late(even: bool) -> list[dict[str, Any]]:
        return [entered(seq, NOW - 60 + seq * 0.2 + (0.1 if even == (seq % 2 == 0) else 0.05)) for seq in range(1, 30)]

    slow = (rank(2, late(True), IN_SCRIPT), rank(3, late(False), IN_SCRIPT))
    explanation = explained(rank(0, steps(0)), rank(1, steps(0.001)), *slow)
    assert (facts(explanation), explanation.node) == (("straggler", None, True), 1)
    check_names(explanation, "node 1", "29 of 29", "99 ms", "dataset.py:88 (read)")


def test_ranks_that_sleep_do_not_wait_for_the_last_one():
    def steps(late_s: float) -> list[dict[str, Any]]:
        return [entered(seq, NOW - 60 + seq * 0.2 + late_s) for seq in range(1, 30)]

    late = rank(1, steps(0.1), IN_SCRIPT)
    assert facts(explained(rank(0, steps(0)), late)) == ("straggler", 1, True)
    asleep = rank(0, steps(0), IN_SCRIPT, wchan="hrtimer_nanosleep")
    assert facts(explained(asleep, late))[1:] == (None, False)


FRAMES = """\
Traceback (most recent call last):
  File "/run/train.py", line 15, in <module>
    for batch in loader:
  File "/lib/torch/utils/data/dataloader.py", line 1306, in _try_get_data
    raise RuntimeError(
"""


IN_TRANSIT = """\
  File "/lib/torch/multiprocessing/reductions.py", line 543, in rebuild_storage_fd
    fd = df.detach()
  File "/lib/python3.11/multiprocessing/connection.py", line 395, in _recv
    raise EOFError
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (f"{FRAMES}RuntimeError: DataLoader worker (pid(s) 9370, 9371) exited unexpectedly\n", "data_loader"),
        (
            f"{FRAMES}RuntimeError: DataLoader worker (pid 8714) exited unexpectedly with exit code 3. Details\n",
            "data_loader",
        ),
        (f"{FRAMES}RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed. \n", "data_loader"),
        (f"{FRAMES}{IN_TRANSIT}ConnectionResetError: [Errno 104] Connection reset by peer\n", "data_loader"),
        (f"{FRAMES}{IN_TRANSIT}FileNotFoundError: [Errno 2] No such file or directory\n", "data_loader"),
        (f"{FRAMES}{IN_TRANSIT}EOFError\n", "data_loader"),
        (f"{FRAMES}FileNotFoundError: Caught FileNotFoundError in DataLoader worker process 0.\n", "failed"),
    ],
)
def test_a_worker_of_a_data_loader_that_has_ended_is_not_taken_for_a_lost_rank(log: str, cause: str) -> None:
    error = log.splitlines()[-1]
    failed = Outcome(code=1, cause="error", message=f"rank 0 on node 0 exited with 1: {error}", node=0, rank=0)
    assert facts(explain_outcome(failed, (), log, (), 2)) == (cause, 0, True)


def test_the_nodes_of_each_version_are_named_and_not_those_without_a_record() -> None:
    environments = {0: {"packages": "a==1 b==2"}, 1: {}, 2: {"packages": "a==2 b==2"}, 3: {"packages": "a==1 b==2"}}
    assert explain_software(environments) == ["a is 1 on nodes 0 and 3, 2 on node 2"]
    many = {node: {"packages": " ".join(f"p{i}=={node}" for i in range(100))} for node in (0, 1)}
    *_, last = explain_software(many)
    assert_names(last, "80")


def test_a_link_to_another_machine_two_links_and_a_moment_are_told_apart():
    to_1, to_0 = ["0A", "0B", 90, 7], ["0B", "0A", 0, 0]
    # Rank 1 does not answer, so it may be at the other end, or not.
    unsure = explain_ranks(read_answer({"node": 0, "ranks": [linked(rank(0, WAITS), ["0A", "7F", 90, 15])]}), 2)
    assert facts(unsure) == ("network", None, False)
    check_names(unsure, "another machine and node 0", "40 s")
    ends = ["0A", "0B", "0C", "0D"]  # of four nodes; two links are down
    nodes = [
        {"node": node, "ranks": [linked(rank(node, WAITS), [ends[node], ends[node ^ 1], 90, 7])]} for node in range(4)
    ]
    both = explain_ranks([view for node in nodes for view in read_answer(node)], 4)
    check_names(both, "node 0 and node 1", "node 2 and node 3")
    short = [*BEFORE, entered(8, NOW - 8, done=False)]
    ranks = (linked(rank(0, short), to_1), rank(1, short), linked(rank(2, short), to_0), rank(3, short))
    assert facts(explained(*ranks)) == ("network", None, False)
    joining = (linked(rank(0, []), to_1), rank(1, []), linked(rank(2, []), to_0), rank(3, []))
    assert facts(explained(*joining)) == ("network", None, True)
