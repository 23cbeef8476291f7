"""What of a rank's last words is shown, and when; and a real node whose ranks all cry when one fails."""


def test_the_console_shows_the_rank_that_failed_first(runs) -> None:
    node = runs.start("cry.py", "1", options=("--nproc-per-node", "3"))
    assert node.end() == 1
    said = [line for line in node.rank_lines() if "ready" not in line]
    assert [line[: len("[node0 rank1]")] for line in said] == ["[node0 rank1]"] * len(said)
    assert said[-1].endswith("ValueError: bad label 17")
    assert all("RuntimeError: gloo/pair.cc: the connection is closed" in node.log(rank) for rank in (0, 2))
    assert (node.outcome().cause, node.outcome().rank) == ("error", 1)
    assert [("rank-0.log, rank-2.log" in line, "rank-1.log" in line) for line in node.messages()[1:]] == [
        (True, False),
        (False, True),
    ]
