"""A node's files: events and history, which another version or a crash may have left; and only files are opened."""

import multiprocessing
import os
from pathlib import Path

import pytest

from ddpwire import events
from ddpwire.events import EventLog, events_of, read_events
from ddpwire.history import COLUMNS, HEADER, fold, line, read_history
from ddpwire.run_files import read_regular


def test_a_line_says_what_happened_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, node=1, rank=2, attempt=3)
    log.emit("checkpoint_saved", step=40, seconds=0.12345, bytes=7)
    log.emit("straggler", rank=5, node=2, ratio=3.0)
    saved, straggler = read_events(path.read_text())
    assert path.read_text().splitlines()[0] == (
        f'{{"time": {saved.time}, "event": "checkpoint_saved", "node": 1, "attempt": 3, "rank": 2, "step": 40, '
        '"seconds": 0.1235, "bytes": 7}'
    )
    assert (saved.facts, straggler.facts) == ({"bytes": 7}, {"ratio": 3.0})
    assert (straggler.rank, straggler.node, straggler.step, straggler.seconds) == (5, 2, None, None)


def test_a_reader_passes_over_what_is_torn_or_strange_and_sorts_by_time() -> None:
    texts = (
        '{"time": 2, "event": "b", "node": 0}\n{"time": 3, "ev',
        '{"time": 1, "event": "a", "node": 1, "colour": "red"}\n[]\n{"event": "c"}\n',
    )
    assert [(event.event, event.facts) for event in read_events(*texts)] == [("a", {"colour": "red"}), ("b", {})]


def test_nobody_to_write_for_a_folder_that_is_gone_and_a_fifo_that_nobody_reads_stop_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    EventLog(None, node=0).emit("node_started")
    events_of({}).emit("training_began")
    for path in (tmp_path / "gone" / "events.jsonl", tmp_path / "events.jsonl"):
        EventLog(path, node=0).emit("node_started")
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


def write_many(path: Path, rank: int) -> None:
    log = EventLog(path, node=0, rank=rank)
    for step in range(400):
        log.emit("epoch_ended", step=step)


def test_many_writers_tear_no_line_and_the_files_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_BYTES", 20_000)
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(path, rank)) for rank in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    before = tmp_path / "events.1.jsonl"
    assert {file.name for file in tmp_path.iterdir()} <= {path.name, before.name}
    text = before.read_text() + (path.read_text() if path.exists() else "")
    assert len(read_events(text)) == len(text.splitlines())
    assert 20_000 < len(text) < 2 * 20_000 + 3 * 200
    assert max(event.step or 0 for event in read_events(text)) == 399


def test_counters_are_summed_and_of_gauges_the_largest_is_kept() -> None:
    samples = [
        ("ddp_samples_total", {"rank": "0"}, 10.0),
        ("ddp_samples_total", {"rank": "1"}, 20.0),
        ("ddp_last_step", {"rank": "0"}, 5.0),
        ("ddp_last_step", {"rank": "1"}, 4.0),
        ("ddp_step_phase_seconds_total", {"rank": "0", "phase": "data"}, 1.0),
        ("ddp_step_phase_seconds_total", {"rank": "1", "phase": "data"}, 2.0),
        ("a_script_s_own", {"rank": "0"}, 1.0),
    ]
    row = fold(samples)
    assert row == {"ddp_last_step": 5.0, "ddp_samples_total": 30.0, "ddp_step_phase_seconds_total:data": 3.0}
    (again,) = read_history(f"{HEADER}\n{line(1000.04, row)}\n")
    assert again == {"time": 1000.0, **row}
    names = HEADER.split(",")
    assert (names[0], len(names), len({*names})) == ("time", len(COLUMNS) + 1, len(COLUMNS) + 1), "each column once"


def test_torn_lines_and_other_columns() -> None:
    text = "time,ddp_loss,ddp_of_tomorrow\n1,0.5,7\n2,,\n3,0.\n4,abc,1\n,0.5,1\n5"
    assert read_history(text) == (
        {"time": 1.0, "ddp_loss": 0.5, "ddp_of_tomorrow": 7.0},
        {"time": 2.0},
        {"time": 3.0, "ddp_loss": 0.0},
        {"time": 5.0},
    )
    assert read_history("") == ()


def test_a_file_is_read_and_a_fifo_a_device_and_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\n")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    assert read_regular(tmp_path / "file") == b"a\n"
    for path in (tmp_path / "fifo", tmp_path / "link", Path("/dev/zero"), tmp_path, tmp_path / "gone"):
        with pytest.raises(OSError, match=r"regular|directory|No such"):
            read_regular(path)
