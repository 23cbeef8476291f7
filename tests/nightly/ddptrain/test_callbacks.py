"""What is seen of a training while it runs: a bar, a trace, a record for who debugs, a time that is over."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.messages import assert_names

TINY = ("--data=synthetic", "--synthetic-samples=64", "--synthetic-shape=1x8x8", "--model=simple", "--batch-size=16")


def test_a_terminal_gets_a_bar_and_the_same_lines(tmp_path: Path) -> None:
    reader, theirs = pty.openpty()
    command = [sys.executable, "-m", "ddptrain", *TINY, "--epochs=2"]
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "NO_COLOR": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, stdout=theirs, stderr=subprocess.PIPE, env=environ)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(reader, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    _, err = process.communicate(timeout=60)
    os.close(reader)
    assert (process.returncode, err) == (0, b"")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).replace("\r", "\n")
    assert re.search(r"epoch [12]/2 .* step [1-8] of 8 .* images/s", text)
    assert re.search(r"^epoch  2/2  loss \d+\.\d{4}  test +\d+\.\d\d %", text, re.MULTILINE)
    assert re.search(r"^weights sha256 [0-9a-f]{16}$", text, re.MULTILINE)


def test_a_trace_of_each_rank_opens(train: Callable[..., list], tmp_path: Path) -> None:
    ended = train(*TINY, "--epochs=3", "--profile=3", size=2)
    assert [rank.code for rank in ended] == [0, 0]
    for rank, process in enumerate(ended):
        path = f"profile/rank-{rank}.json"
        assert path in process.err
        assert_names(process.err, "3", "//ui.perfetto.dev")
        events = json.loads((tmp_path / path).read_text())["traceEvents"]
        names = [event["name"] for event in events if event.get("ph") == "X"]
        assert sum(name.startswith("ProfilerStep#") for name in names) == 3
        assert any("allreduce" in name or "all_reduce" in name for name in names)


def test_no_trace_of_a_training_that_is_too_short(train: Callable[..., list]) -> None:
    ended = train(*TINY, "--epochs=1", "--profile=3")[0]
    assert ended.code == 0
    assert_names(ended.err, "--profile", "5")


def test_a_training_stops_after_the_given_time(train: Callable[..., list], tmp_path: Path) -> None:
    began = time.monotonic()
    ended = train("--epochs=1000", "--stop-after=0.04", size=2)
    assert time.monotonic() - began >= 2.4
    assert [(rank.code, rank.err) for rank in ended] == [(143, "")] * 2
    newest = max((tmp_path / "checkpoints").glob("step-*.pt")).name
    assert_names(ended[0].out.splitlines()[-1], "--stop-after", int(newest[5:13]), "45000", newest)


def test_debugging_trains_and_keeps_a_record_of_a_lost_rank(train: Callable, start: Callable, tmp_path: Path) -> None:
    assert [rank.code for rank in train(*TINY, "--epochs=2", "--debug", "--checkpoint-dir=other", size=2)] == [0, 0]
    world = start("--epochs=50", "--debug", size=2)
    world.wait_for("epoch  1/50")
    world.ranks[1].kill()
    rank_0, _ = world.end()
    assert rank_0.code == 142
    (line,) = [line for line in rank_0.err.splitlines() if "flight-recorder-0.json" in line]
    assert_names(line, "rank 0", "flight-recorder-0.json")
    record = json.loads((tmp_path / "flight-recorder-0.json").read_text())
    assert record["entries"]
