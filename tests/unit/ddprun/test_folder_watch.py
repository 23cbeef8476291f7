"""A run's folder that is deleted, or whose file system does not answer, while the node runs."""

import os
import queue
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from ddprun import main
from ddprun.health import folder_watch
from ddprun.health.folder_watch import FolderWatch
from ddprun.system.file_writer import FileWriter
from ddpwire.exits import Exit


@pytest.fixture
def frozen(tmp_path, monkeypatch):
    """A watch whose file system answers only while ``answers`` is set, its lines, and what it gives up with."""
    answers, given_up, lines = threading.Event(), queue.Queue(), queue.Queue()
    lock = tmp_path / "ddprun.lock"
    lock.touch()
    touch = os.utime
    monkeypatch.setattr(os, "utime", lambda path: answers.wait() and touch(path))
    monkeypatch.setattr(folder_watch, "PATH_INTERVAL", 1)
    monkeypatch.setattr(folder_watch, "INTERVAL_S", 0.02)
    monkeypatch.setattr(folder_watch, "WARN_AFTER_S", 0.2)
    with lock.open() as file:
        folder = SimpleNamespace(path=tmp_path, lock_fd=file.fileno(), has_locks=True)
        with FolderWatch(folder, FileWriter(), log=lines.put, stop=lambda: None, give_up=given_up.put):
            yield answers, lines, given_up
        lock.unlink()  # its threads end
        answers.set()
        for thread in threading.enumerate():
            if thread.name == "folder":
                thread.join(60)


def test_a_frozen_file_system_is_named_and_given_up(frozen, monkeypatch):
    monkeypatch.setattr(folder_watch, "GIVE_UP_AFTER_S", 0.6)
    _, lines, given_up = frozen
    assert given_up.get(timeout=60).code == Exit.CANNOT_WRITE
    assert lines.qsize() == 1


def test_a_file_system_that_is_slow_is_not_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_watch, "INTERVAL_S", 0.02)
    monkeypatch.setattr(folder_watch, "WARN_AFTER_S", 0.3)
    lines, writer = queue.Queue(), FileWriter(fork=True)
    writer.start()
    calls = [writer.submit(time.sleep, 0.05) for _ in range(15)]
    with (tmp_path / "ddprun.lock").open("w") as file:
        folder = SimpleNamespace(path=tmp_path, lock_fd=file.fileno(), has_locks=True)
        watch = FolderWatch(folder, writer, log=lines.put, stop=lambda: None, give_up=lines.put)
        with watch:
            calls[-1].result(60)
        (tmp_path / "ddprun.lock").unlink()
    for thread in threading.enumerate():
        if thread.name == "folder":
            thread.join(60)
    assert lines.empty()


def test_one_that_answers_again_is_not_given_up(frozen):
    answers, lines, given_up = frozen
    first = lines.get(timeout=60)
    answers.set()
    assert lines.get(timeout=60) != first
    assert given_up.empty()


@pytest.mark.parametrize("answers", [True, False])
def test_a_start_on_a_frozen_file_system_waits_and_then_ends(answers, tmp_path, monkeypatch):
    fifo = tmp_path / "answer"
    os.mkfifo(fifo)
    monkeypatch.setattr(main, "WARN_AFTER_S", 0.1)
    monkeypatch.setattr(main, "GIVE_UP_AFTER_S", 120.0 if answers else 0.3)
    monkeypatch.setattr(os, "utime", lambda _: fifo.read_text())  # in the forked process
    monkeypatch.setattr(os, "_exit", sys.exit)
    files, lines = FileWriter(fork=True), []

    def log(line):
        lines.append(line)
        if answers and len(lines) == 1:
            fifo.write_text("now")

    monkeypatch.setattr(main, "log_early", log)
    of_node = {"machine": 0, "is_replaced": False, "join_timeout_s": 1.0, "checkpoint_dir": None}
    config = SimpleNamespace(run_dir=tmp_path / "run", **of_node)
    try:
        main.prepare_folders(config, files)
        code = Exit.OK
    except SystemExit as end:
        code = end.code
    assert (code, len(lines)) == (Exit.OK if answers else Exit.CANNOT_WRITE, 2)
    assert (tmp_path / "run/node-0").is_dir()
    os.kill(files.pid, signal.SIGKILL)
    os.waitpid(files.pid, 0)
