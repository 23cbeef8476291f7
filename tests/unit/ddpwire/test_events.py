"""Events: whole lines, in bounded files, that a reader of another version survives."""

import multiprocessing
import os
from pathlib import Path

import pytest

from ddpwire import events
from ddpwire.events import EventLog, events_of, read_events


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


def test_nobody_to_write_for_and_a_folder_that_is_gone_stop_nothing(tmp_path: Path) -> None:
    EventLog(None, node=0).emit("node_started")
    EventLog(tmp_path / "gone" / "events.jsonl", node=0).emit("node_started")
    events_of({}).emit("training_began")
    assert list(tmp_path.iterdir()) == []


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


def test_a_fifo_that_nobody_reads_stops_no_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    EventLog(tmp_path / "events.jsonl", node=0).emit("node_started")
