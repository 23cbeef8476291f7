"""A rank's stdin, stdout and stderr: apart, as they come where one rank is shown, and a terminal where there is one."""

import os

from ddprun.output.console import Console
from ddprun.output.log_view import PROGRESS_S, View
from ddprun.output.logs import RankFile, Stream
from ddprun.output.timed_log import TimedLog


class Shown(Console):
    """Keeps what is put on the console."""

    def __init__(self) -> None:
        super().__init__("node0")
        self.texts: list[bytes] = []

    def put(self, _descriptor: int, text: bytes, _source: object = None) -> None:  # type: ignore[override]
        self.texts.append(text)


def test_a_progress_bar_of_several_ranks_is_shown_once_a_second_and_its_last_state_always() -> None:
    console = Shown()
    view = View(console, 2, b"[r1] ", 1)
    view.accept(b"\r 10%", 10.0)
    assert console.texts == [b"\r[r1]  10%"]
    view.accept(b"\r 20%", 10.1)
    view.accept(b"\r 3", 10.2)
    assert len(console.texts) == 1
    assert view.needs_tick
    view.tick(10.0 + PROGRESS_S - 0.1)
    assert len(console.texts) == 1
    view.tick(10.0 + PROGRESS_S)
    assert console.texts[1:] == [b"\r[r1]  3  "], "it covers the longer state before"
    assert not view.needs_tick
    view.accept(b"\r100%\n", 11.1)
    assert console.texts[2:] == [b"\r[r1] 100%\n"]
    view.accept(b"next\r\nlast\r\r", 11.2)
    view.accept(b"", 11.3)
    assert console.texts[3:] == [b"[r1] next\n", b"[r1] last\n"]


def test_a_traceback_after_an_unfinished_bar_is_held_like_any_other() -> None:
    console = Shown()
    view = View(console, 2, b"[r1] ", 1)
    view.accept(b"\r 10%", 10.0)
    view.accept(b"Traceback (most recent call last):\n  File x\nValueError: a\n", 10.1)
    assert console.texts == [b"\r[r1]  10%", b"\r[r1]  10%\n"]
    view.release()
    assert (
        b"".join(console.texts[2:]) == b"[r1] Traceback (most recent call last):\n[r1]   File x\n[r1] ValueError: a\n"
    )


def test_the_file_of_a_rank_has_whole_lines_of_both_streams(tmp_path) -> None:
    file = RankFile(tmp_path / "rank-0.log", num_streams=2)
    pipes = [os.pipe(), os.pipe()]
    out, err = (
        Stream(read, number, 0, file, View(Shown(), number, b"", 0), TimedLog(tmp_path / "rank-0.timed.log", 0, 0))
        for number, (read, _) in enumerate(pipes, 1)
    )

    def write(stream: int, text: bytes, now: float) -> None:
        os.write(pipes[stream - 1][1], text)
        (out if stream == 1 else err).read(now)

    write(1, b"half a ", 1.0)
    write(2, b"warning\n", 1.01)
    write(1, b"line\n", 1.02)
    write(2, b"\r 10%", 2.0)
    err.tick(3.1)
    write(1, b"step 1\n", 3.2)
    write(2, b"\r 20%\n", 3.3)
    assert (tmp_path / "rank-0.log").read_bytes() == b"warning\nhalf a line\n\r 10%\nstep 1\n\r 20%\n"
    write(1, b"cut", 4.0)
    for stream, (_, end) in zip((out, err), pipes, strict=True):
        os.close(end)
        assert stream.read(4.1) is False
        stream.close()
    assert (tmp_path / "rank-0.log").read_bytes().endswith(b"\ncut")
    again = RankFile(tmp_path / "rank-0.log", num_streams=1)
    again.write(out, b"next attempt\n")
    again.close()
    assert (tmp_path / "rank-0.log").read_bytes().endswith(b"\ncut\nnext attempt\n")
