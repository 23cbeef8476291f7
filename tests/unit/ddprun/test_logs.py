"""Ranks' lines on their way: nobody blocks a rank for long or tears a line; bars, last words and the error in a log."""

import os
import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import record

from ddprun.output import progress
from ddprun.output.console import MAX_QUEUED_TEXTS, Console
from ddprun.output.log_view import HOLD_S, MAX_HELD_LINES, PROGRESS_S, View
from ddprun.output.logs import RankFile, RankLogs, Stream, TimedLog
from ddprun.output.progress import Progress
from ddprun.output.rank_errors import last_error
from ddprun.settings import node_config, options
from ddpwire import names
from ddpwire.run_files import rank_error, rank_log, write_error


def test_each_line_has_the_time_at_which_its_end_was_read(tmp_path, monkeypatch):
    path = tmp_path / "rank-3.timed.log"
    log = TimedLog(path, 1, 3)
    before = datetime.now(UTC)
    log.add(b"[rank3]: one\ntw")
    assert path.read_text().count("\n") == 1
    log.add(b"o\n 10%\r 20%\r\nlast")
    log.add(b"")
    times, lines = zip(*(line.split(" ", 1) for line in path.read_text().splitlines()), strict=True)
    assert lines == tuple(f"[node1 rank3] {text}" for text in ("one", "two", " 20%", "last"))
    moments = [datetime.fromisoformat(time) for time in times]
    assert before - timedelta(milliseconds=1) <= moments[0] <= moments[-1] <= datetime.now(UTC)
    assert moments == sorted(moments)
    monkeypatch.setattr("ddprun.output.logs.MAX_BYTES", 1)
    log.add(b"more\n")
    log.add(b"most\n")
    assert not path.exists()
    assert (tmp_path / "rank-3.timed.1.log").read_text().endswith("[node1 rank3] most\n")
    TimedLog(tmp_path / "none" / "timed" / "a.log", 0).add(b"a folder that is gone is not made again\n")
    assert not (tmp_path / "none").exists()


def test_a_reader_that_is_stuck_costs_lines_on_stdout_and_none_in_the_file(tmp_path, monkeypatch):
    read, write = os.pipe()
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(write if fd == 1 else fd, data))
    console = Console("node0")
    console.start()
    config = node_config.read_config(options.parse(["--nproc-per-node=8", "x.py"]), {}, lambda _: 8)
    logs = RankLogs(console, config)
    streams = logs.open(5, 5, tmp_path / "rank-5.log")
    lines = b"".join(b"%d\n" % number for number in range(3 * MAX_QUEUED_TEXTS))
    sent = 0
    while sent < len(lines):
        sent += real(streams[1], lines[sent : sent + 4096])
    for descriptor in streams:
        os.close(descriptor)
    logs.drain(60.0)
    assert (tmp_path / "rank-5.log").read_bytes() == lines
    os.set_blocking(read, False)
    output = b""
    while not output.endswith(b"\n") or output.count(b"\n") < MAX_QUEUED_TEXTS // 2:
        try:
            output += os.read(read, 1 << 16)
        except BlockingIOError:
            time.sleep(0.01)
    whole = [b"[node0 rank5] %d" % number for number in range(output.count(b"\n"))]
    assert output.splitlines()[: MAX_QUEUED_TEXTS // 2] == whole[: MAX_QUEUED_TEXTS // 2]
    while console._texts.unfinished_tasks:
        try:
            os.read(read, 1 << 16)
        except BlockingIOError:
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("epoch 1\nTraceback (most recent call last):\n  File x\nValueError: bad 17\n", "ValueError: bad 17"),
        ("epoch 3/10 loss 0.1\n", ""),
        ("Traceback (most recent call last):\nValueError: caught\n" + "and continued\n" * 21, ""),
        (
            "Traceback (most recent call last):\n  File x\nRuntimeError: Error(s) in loading state_dict for Net:\n"
            '\tMissing key(s) in state_dict: "fc.bias". \n\tsize mismatch\n',
            'RuntimeError: Error(s) in loading state_dict for Net: Missing key(s) in state_dict: "fc.bias".',
        ),
    ],
)
def test_the_error_in_a_ranks_log(tmp_path, text, word):
    (tmp_path / rank_log(3)).write_text(text)
    assert last_error(tmp_path, 3, 1) == word


def test_the_error_file_comes_before_the_log(tmp_path, monkeypatch):
    """ddptrain's, and that of torch's ``record``, which a script of torchrun's may use."""
    (tmp_path / rank_log(3)).write_text("Traceback (most recent call last):\nKeyError: 3\n")
    write_error("no MNIST in data", {names.ERROR_FILE: str(tmp_path / rank_error(3))})
    assert last_error(tmp_path, 3, 1) == "no MNIST in data"
    monkeypatch.setenv(names.ERROR_FILE, str(tmp_path / rank_error(3)))
    with pytest.raises(ValueError, match="bad label 17"):
        record(fail)()
    assert last_error(tmp_path, 3, 1) == "ValueError: bad label 17"
    (tmp_path / rank_error(3)).write_text('{"message": ')
    assert last_error(tmp_path, 3, 1) == "KeyError: 3"


def fail():
    raise ValueError("bad label 17")


@pytest.mark.parametrize(
    ("error", "names_worker"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory", True),
        ("EOFError", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'train.csv'", False),
    ],
)
def test_error_of_a_data_loader_worker_that_ended_names_the_worker(tmp_path, error, names_worker):
    ended = "DataLoader worker (pid 21433) exited unexpectedly with exit code 1"
    write_error(error, {names.ERROR_FILE: str(tmp_path / rank_error(0))})
    (tmp_path / rank_log(0)).write_text(f"{error}\nRuntimeError: {ended}. Details are lost due to multiprocessing.\n")
    assert last_error(tmp_path, 0, 1) == (f"{ended}: {error}" if names_worker else error)


def test_a_line_after_5_s_and_then_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = [100.0], list[str]()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    wait = Progress(lines.append, "importing torch")
    for _ in range(150):
        now[0] += 1
        wait.update()
    assert [int(re.findall(r"\d+", line)[0]) for line in lines] == [5, 10, 20, 40, 70, 100, 130]
    assert all("importing torch" in line for line in lines)


CRASH = [b"[rank1]: Traceback (most recent call last):", b"[rank1]:   File x", b"[rank1]: ValueError: bad label 17"]


class Screen:
    """A console with the view of one rank."""

    def __init__(self) -> None:
        self._shown: list[bytes] = []
        console: Any = self
        self.view = View(console, 1, b"", 0)

    def put(self, _descriptor: int, text: bytes, _source: object) -> None:
        self._shown.append(text.removesuffix(b"\n"))

    def shows(self, lines: list[bytes] = [], now: float = 0.0) -> list[bytes]:  # noqa: B006 -- it stays as it is
        """What is shown since the last call, after the rank has printed ``lines``."""
        self.view.accept(b"".join(line + b"\n" for line in lines), now) if lines else self.view.tick(now)
        shown, self._shown = self._shown, []
        return shown


def test_lines_are_held_from_a_crash_on_until_the_decision() -> None:
    guilty, peer = Screen(), Screen()
    assert guilty.shows([b"step 1"]) == [b"step 1"]
    assert guilty.shows([b"step 2", *CRASH[:2]]) == [b"step 2"]
    assert guilty.shows(CRASH[2:], 1.0) == []
    assert peer.shows(CRASH, 1.0) == []
    guilty.view.release()
    assert guilty.shows(now=1.0) == CRASH
    assert guilty.shows(CRASH, 2.0) == CRASH, "it has been judged"
    peer.view.suppress()
    peer.view.release()
    assert peer.shows([b"and more"], 2.0) == []
    assert (guilty.view.num_suppressed, peer.view.num_suppressed) == (0, 4)


def test_a_script_that_catches_its_error_is_shown_after_a_while() -> None:
    screen = Screen()
    assert screen.shows(CRASH) == []
    assert screen.view.needs_tick
    assert screen.shows(now=HOLD_S - 0.1) == []
    assert screen.shows(now=HOLD_S + 0.1) == CRASH
    assert (screen.view.needs_tick, screen.shows([b"step 3"], HOLD_S + 0.2)) == (False, [b"step 3"])
    assert screen.shows(CRASH, 20.0) == [], "and the next error is held again"
    assert len(screen.shows([b"step"] * MAX_HELD_LINES, 20.1)) == MAX_HELD_LINES + 3


def test_a_traceback_or_an_abort_begins_a_crash() -> None:
    for line in (CRASH[0], b"[rank1]: " + CRASH[0], b"Traceback (most recent call last):",
                 b"terminate called after throwing an instance of 'x'",
                 b"[rank3]:[E1120 17:00:00.1 ProcessGroupNCCL.cpp:1] Watchdog"):  # fmt: skip
        assert Screen().shows([line]) == []
    for line in (
        b"epoch 1",
        b"[rank3]:[W1120 17:00:00.1 x.cpp:1] a warning",
        b"see Traceback (most recent call last):",
    ):
        assert Screen().shows([line]) == [line]


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
