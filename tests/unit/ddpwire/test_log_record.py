"""A node's events and history in its log: what is packed, how much of a long run, and what is read of a strange log."""

import random
from itertools import pairwise
from pathlib import Path

import pytest

from ddpwire import log_record
from ddpwire.events import EVENTS, EventLog, read_events
from ddpwire.history import HEADER, HISTORY, line, read_history
from ddpwire.run_files import ENVIRONMENT, OUTCOME, Outcome, read_outcome


def log_of(node_dir: Path, node: int = 1) -> str:
    return "[node1 rank0] epoch 1\n" + "".join(f"[node{node}] {part}\n" for part in log_record.pack(node_dir, 1e6))


def write(node_dir: Path, *, rows: int, events: int) -> None:
    log = EventLog(node_dir / EVENTS, node=1)
    for number in range(events):
        log.emit(
            "checkpoint_saved", step=number, noise=[random.Random(number * 9 + more).random() for more in range(4)]
        )
    noise = random.Random(0)
    steps = [line(1e9 + row, {"ddp_loss": noise.random(), "ddp_last_step": float(row)}) for row in range(rows)]
    (node_dir / HISTORY).write_text("\n".join((HEADER, *steps, "")))
    (node_dir / ENVIRONMENT).write_text('{"torch": "2.9"}')


def test_what_is_packed_is_read_again_and_is_no_line_for_a_person(tmp_path: Path) -> None:
    write(tmp_path, rows=10, events=5)
    log = log_of(tmp_path) + "[node1] stopped\n"
    assert log_record.unpack(log) == {name: (tmp_path / name).read_text() for name in (HISTORY, EVENTS, ENVIRONMENT)}
    assert log_record.without(log) == "[node1 rank0] epoch 1\n[node1] stopped\n"


def test_a_long_run_is_bounded_and_keeps_its_end(tmp_path: Path) -> None:
    write(tmp_path, rows=1200, events=4000)
    log = log_of(tmp_path)
    assert len(log) < 130_000
    assert max(map(len, log.splitlines())) < 1100
    files = log_record.unpack(log)
    assert read_events(files[EVENTS])[-1].step == 3999
    rows = read_history(files[HISTORY])
    assert rows[-1]["ddp_last_step"] == 1199
    assert len(rows) > 10
    assert len({after["time"] - before["time"] for before, after in pairwise(rows)}) == 1
    assert files[ENVIRONMENT] == (tmp_path / ENVIRONMENT).read_text()


def test_a_log_has_at_most_three_lines_and_one_for_each_further_minute(tmp_path: Path) -> None:
    write(tmp_path, rows=1200, events=4000)
    Outcome(code=3, cause="error", message="rank 1 on node 1 exited with 3").write(tmp_path)
    for seconds, most in ((0.0, 3), (59.0, 3), (600.0, 10), (1e6, 120)):
        lines = log_record.pack(tmp_path, seconds)
        assert len(lines) <= most
        files = log_record.unpack("".join(f"[node1] {line}\n" for line in lines))
        assert read_outcome(files[OUTCOME]).code == 3
        assert read_events(files[EVENTS])[-1].step == 3999


BEGINS = ("node_started", "preflight_done", "rendezvous_done", "ranks_started", "first_step", "rank_exited")


@pytest.mark.parametrize(("rows", "events"), [(100, 100), (1200, 0)], ids=["checkpoints", "history"])
def test_the_events_that_begin_the_phases_are_kept_when_checkpoints_or_the_history_do_not_fit(
    rows: int, events: int, tmp_path: Path
) -> None:
    log = EventLog(tmp_path / EVENTS, node=1)
    for kind in BEGINS:
        log.emit(kind)
    write(tmp_path, rows=rows, events=events)
    log.emit("node_ended")
    lines = "".join(f"[node1] {part}\n" for part in log_record.pack(tmp_path, 20.0))
    kinds = [event.event for event in read_events(log_record.unpack(lines)[EVENTS])]
    assert [kind for kind in kinds if kind != "checkpoint_saved"] == [*BEGINS, "node_ended"]
