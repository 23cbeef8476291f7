"""What of a rank's last words is shown, and when; and a real node whose ranks all cry when one fails."""


def test_the_last_lines_of_a_rank_that_failed_are_shown_again(runs) -> None:
    """They stand next to the reason, once."""
    node = runs.start("cry.py", "1", "talk", options=("--nproc-per-node", "2"))
    assert node.end() == 3
    (line,) = node.messages()[1:]
    assert "RUN/node-0/rank-1.log" in line


def test_the_lines_of_an_earlier_start_in_the_same_folder_are_not_shown(runs, tmp_path) -> None:
    script = tmp_path / "script.py"
    for text, code in (("raise ValueError('bad label 17')", 1), ("import sys; sys.exit(3)", 3)):
        script.write_text(text)
        node = runs.start(str(script), options=("--nproc-per-node", "2"))
        assert node.end() == code
        assert ("bad label 17" in "".join(node.rank_lines())) == (code == 1)
    assert "bad label 17" in node.log(0)
