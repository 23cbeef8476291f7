"""Lines on their way: whoever reads them slowly, or not at all, never blocks a rank for long, and never tears one."""

import os

import pytest
from tests.unit.ddprun import test_logs
from tests.unit.ddprun.test_logs import Shown

from ddprun.output.console import Console
from ddprun.output.log_view import View
from ddprun.output.logs import RankLogs
from ddprun.output.rank_errors import last_error
from ddprun.settings import node_config, options
from ddpwire import names
from ddpwire.run_files import rank_error, rank_log, write_error


def test_a_rank_that_ends_is_caught_up_while_its_streams_are_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("ddprun.output.logs.time.sleep", lambda _: None)  # look without a pause
    monkeypatch.setattr("ddprun.output.logs.CATCH_UP_S", 240.0)  # the thread that reads may be kept from a core
    config = node_config.read_config(options.parse(["--nproc-per-node=1", "x.py"]), {}, lambda _: 1)
    logs = RankLogs(Console("node0"), config)
    for attempt in range(300):
        path = tmp_path / f"{attempt}.log"
        streams = logs.open(0, 0, path)
        os.write(streams[1], b"last words\n")
        for descriptor in streams:
            os.close(descriptor)
        logs.catch_up(0)  # raised EBADF for a descriptor that the thread had just closed
        assert path.read_bytes() == b"last words\n"
        logs.close_attempt(restarting=True)


def test_a_traceback_is_no_cause_of_another_exit_code(tmp_path):
    (tmp_path / rank_log(3)).write_text("Traceback (most recent call last):\n  File x\nKeyError: 3\n")
    assert (last_error(tmp_path, 3, 3), last_error(tmp_path, 3, 1)) == ("", "KeyError: 3")


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (
            "usage: x.py [-h]\nx.py: error: unrecognized arguments: --foo\n",
            "x.py: error: unrecognized arguments: --foo",
        ),
        ("Usage: x.py\n\nError: No such option: --foo\n\n", "Error: No such option: --foo"),
        ("x.py: error: an earlier line\nepoch 1\n", ""),
        ("Traceback (most recent call last):\n  File x\nKeyError: 3\n", ""),
        ("", ""),
    ],
)
def test_the_last_line_of_a_parser_of_arguments_is_the_error_of_exit_code_2(tmp_path, log, error):
    (tmp_path / rank_log(3)).write_text(log)
    assert last_error(tmp_path, 3, 2) == error


def test_an_error_of_distributed_checkpoints_names_the_error_of_the_rank(tmp_path):
    error = "dcp.api.CheckpointException: CheckpointException ranks:dict_keys([0])\n"
    error += "Traceback (most recent call last): (RANK 0)\n  File x\nRuntimeError: Missing key in state_dict: b.\n\n"
    (tmp_path / rank_log(3)).write_text(f"Traceback (most recent call last):\n  File y\n{error}")
    in_log = last_error(tmp_path, 3, 1)
    write_error(error, {names.ERROR_FILE: str(tmp_path / rank_error(3))})
    in_file = last_error(tmp_path, 3, 1)
    assert [text.endswith(": RuntimeError: Missing key in state_dict: b.") for text in (in_log, in_file)] == [True] * 2


def test_a_traceback_of_an_earlier_attempt_is_no_cause(tmp_path):
    old = "Traceback (most recent call last):\n  File x\nKeyError: 3\n"
    (tmp_path / rank_log(3)).write_text(f"{old}epoch 1\n")
    assert last_error(tmp_path, 3, 1, start=len(old)) == ""
    (tmp_path / rank_log(3)).write_text(old * 2)
    assert last_error(tmp_path, 3, 1, start=len(old)) == "KeyError: 3"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[rank1]: Traceback (most recent call last):\n[rank1]:   File x\n[rank1]: KeyError: 3\n", "KeyError: 3"),
        (
            "Traceback (most recent call last):\n  File x\nValueError: a\nSet HYDRA_FULL_ERROR=1\n",
            "the last traceback in its log: ValueError: a",
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
        ("", ""),
    ],
)
def test_the_error_in_a_ranks_log(tmp_path, text, word):
    test_logs.test_the_error_in_a_ranks_log(tmp_path, text, word)


@pytest.mark.parametrize(
    ("error", "names_worker"),
    [
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("KeyError: 3", False),
    ],
)
def test_error_of_a_data_loader_worker_that_ended_names_the_worker(tmp_path, error, names_worker):
    test_logs.test_error_of_a_data_loader_worker_that_ended_names_the_worker(tmp_path, error, names_worker)


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


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (
            "Traceback (most recent call last):\n  File x\ntorch.distributed.DistBackendError: NCCL error in: a.cpp:1\n"
            "ncclSystemError: System call failed.\nLast error:\nConnect to 10.0.0.1 failed\n",
            "the last traceback in its log: torch.distributed.DistBackendError: NCCL error in: a.cpp:1: "
            "Connect to 10.0.0.1 failed",
        ),
    ],
)
def test_the_last_error_of_nccl_is_that_of_the_rank(tmp_path, text, word):
    test_logs.test_the_error_in_a_ranks_log(tmp_path, text, word)
