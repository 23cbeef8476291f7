"""What a cell shows of its run's log."""

from pathlib import Path

import pytest

from ddpctl.notebook.session import Tail


def test_a_bar_reaches_the_cell_as_it_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "node.log"
    tail = Tail(log)
    tail.print_new()
    for text in ("a line\n", "\r[node0 rank0]  45%|█", "\r[node0 rank0]  46%|█"):
        with log.open("a") as file:
            file.write(text)
        tail.print_new()
        assert capsys.readouterr().out == text
    tail.end_line()
    tail.close()
    assert capsys.readouterr().out == "\n"


def test_a_character_that_is_torn_between_two_reads_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "node.log"
    tail = Tail(log)
    for part in ("█".encode()[:1], "█".encode()[1:]):
        with log.open("ab") as file:
            file.write(part)
        tail.print_new()
    assert capsys.readouterr().out == "█"
    tail.close()
