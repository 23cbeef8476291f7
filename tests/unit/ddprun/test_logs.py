"""Lines on their way: whoever reads them slowly, or not at all, never blocks a rank for long, and never tears one."""

import os
import time
from datetime import UTC, datetime, timedelta

import pytest
from torch.distributed.elastic.multiprocessing.errors import record

from ddprun.output.console import MAX_QUEUED_TEXTS, Console
from ddprun.output.logs import RankLogs
from ddprun.output.rank_errors import last_error
from ddprun.output.timed_log import TimedLog
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
    monkeypatch.setattr("ddprun.output.timed_log.MAX_BYTES", 1)
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
        ("[rank1]: Traceback (most recent call last):\n[rank1]:   File x\n[rank1]: KeyError: 3\n", "KeyError: 3"),
        ("epoch 3/10 loss 0.1\n", ""),
        ("Traceback (most recent call last):\nValueError: caught\n" + "and continued\n" * 21, ""),
        (
            "Traceback (most recent call last):\n  File x\nValueError: a\nSet HYDRA_FULL_ERROR=1\n",
            "the last traceback in its log: ValueError: a",
        ),
        (
            "Traceback (most recent call last):\n  File x\nRuntimeError: Error(s) in loading state_dict for Net:\n"
            '\tMissing key(s) in state_dict: "fc.bias". \n\tsize mismatch\n',
            'RuntimeError: Error(s) in loading state_dict for Net: Missing key(s) in state_dict: "fc.bias".',
        ),
        (
            "  + Exception Group Traceback (most recent call last):\n  |   File x\n"
            "  | ExceptionGroup: two (2 sub-exceptions)\n"
            "  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n    | ValueError: 1\n",
            "ExceptionGroup: two (2 sub-exceptions)",
        ),
        (
            "  File x, line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed\n",
            "SyntaxError: '(' was never closed",
        ),
        (
            "Traceback (most recent call last):\n  File x\ntorch.distributed.DistBackendError: NCCL error in: a.cpp:1\n"
            "ncclSystemError: System call failed.\nLast error:\nConnect to 10.0.0.1 failed\n",
            "the last traceback in its log: torch.distributed.DistBackendError: NCCL error in: a.cpp:1: "
            "Connect to 10.0.0.1 failed",
        ),
        ("", ""),
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
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("EOFError", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'train.csv'", False),
        ("KeyError: 3", False),
    ],
)
def test_error_of_a_data_loader_worker_that_ended_names_the_worker(tmp_path, error, names_worker):
    ended = "DataLoader worker (pid 21433) exited unexpectedly with exit code 1"
    write_error(error, {names.ERROR_FILE: str(tmp_path / rank_error(0))})
    (tmp_path / rank_log(0)).write_text(f"{error}\nRuntimeError: {ended}. Details are lost due to multiprocessing.\n")
    assert last_error(tmp_path, 0, 1) == (f"{ended}: {error}" if names_worker else error)
