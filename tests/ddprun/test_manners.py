"""What of a rank's last words is shown, and when; and a real node whose ranks all cry when one fails."""

from ddprun.manners import HOLD_S, MOST_LINES, Manners

CRASH = [b"[rank1]: Traceback (most recent call last):", b"[rank1]:   File x", b"[rank1]: ValueError: bad label 17"]


def test_lines_are_held_from_a_crash_on_until_the_verdict() -> None:
    guilty, peer = Manners(), Manners()
    assert guilty.hear([b"step 1"], 0.0) == [b"step 1"]
    assert guilty.hear([b"step 2", *CRASH[:2]], 0.0) == [b"step 2"]
    assert guilty.hear(CRASH[2:], 1.0) == []
    assert peer.hear(CRASH, 1.0) == []
    assert guilty.acquit() == CRASH
    assert guilty.hear(CRASH, 2.0) == CRASH, "it has been judged"
    peer.silence()
    assert peer.acquit() == []
    assert peer.hear([b"and more"], 2.0) == []
    assert (guilty.num_left_out, peer.num_left_out) == (0, 4)


def test_a_script_that_catches_its_error_is_shown_after_a_while() -> None:
    one = Manners()
    assert one.hear(CRASH, 0.0) == []
    assert one.holds
    assert one.due(HOLD_S - 0.1) == []
    assert one.due(HOLD_S + 0.1) == CRASH
    assert (one.holds, one.hear([b"step 3"], HOLD_S + 0.2)) == (False, [b"step 3"])
    assert one.hear(CRASH, 20.0) == [], "and the next error is held again"
    assert len(one.hear([b"step"] * MOST_LINES, 20.1)) == MOST_LINES + 3


def test_what_begins_a_crash() -> None:
    for line in (CRASH[0], b"Traceback (most recent call last):", b"terminate called after throwing an instance of 'x'",
                 b"[rank3]:[E1120 17:00:00.1 ProcessGroupNCCL.cpp:1] Watchdog"):  # fmt: skip
        assert Manners().hear([line], 0.0) == []
    for line in (
        b"epoch 1",
        b"[rank3]:[W1120 17:00:00.1 x.cpp:1] a warning",
        b"see Traceback (most recent call last):",
    ):
        assert Manners().hear([line], 0.0) == [line]


def test_the_console_of_a_failure_has_the_one_who_is_to_blame(runs) -> None:
    node = runs.start("cry.py", "1", options=("--nproc-per-node", "3"))
    assert node.end() == 1
    said = [line for line in node.stdout.read_text().splitlines() if "ready" not in line]
    assert [line[: len("[node0 rank1]")] for line in said] == ["[node0 rank1]"] * len(said)
    assert said[-1].endswith("ValueError: bad label 17")
    assert all("RuntimeError: gloo/pair.cc: the connection is closed" in node.log(rank) for rank in (0, 2))
    assert node.said() == [
        "[node0] ranks 0 to 2 of 3 started (attempt 1)",
        "[node0] what other ranks said as they went down is in RUN/node-0: rank-0.log, rank-2.log",
        "[node0] rank 1 on node 0 exited with 1: ValueError: bad label 17 "
        "(exit code 1; the log of rank 1 is RUN/node-0/rank-1.log)",
    ]


def test_a_rank_that_was_heard_long_ago_is_heard_again(runs) -> None:
    """Its last lines stand next to the reason, once."""
    node = runs.start("cry.py", "1", "talk", options=("--nproc-per-node", "2"))
    assert node.end() == 3
    assert node.said()[1:] == [
        "[node0] rank 1 said: ready",
        "[node0] rank 1 said: no picture in /data",
        "[node0] rank 1 on node 0 exited with 3 (exit code 3; the log of rank 1 is RUN/node-0/rank-1.log)",
    ]
