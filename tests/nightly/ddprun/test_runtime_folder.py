"""The runtime folder while two threads or two nodes use it, and the queue of a slow disk."""

import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.fixtures.nodes import until
from tests.unit.ddprun.test_runtime_folder import block

from ddprank.heartbeat import Heart
from ddprun.agent import NodeAgent
from ddprun.files.runtime_dir import PREFIX, RuntimeDir
from ddprun.health.heartbeat_monitor import HeartbeatMonitor
from ddprun.system import file_writer
from ddprun.system.file_writer import FileWriter
from ddpwire.run_files import METRICS, rank_heartbeat


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment whose XDG_RUNTIME_DIR is the only place for runtime folders that the tests look into."""
    folder = tmp_path / "xdg"
    folder.mkdir(mode=0o700)
    return {"XDG_RUNTIME_DIR": str(folder)}


def test_a_place_that_vanishes_and_returns_is_used_again(base):
    runtime = RuntimeDir("a", 0, base)
    shutil.rmtree(runtime.path)
    assert runtime.restore()
    assert (runtime.path / METRICS).is_dir()
    assert not runtime.restore()


def test_a_folder_that_was_removed_is_not_made_anew(base):
    runtime = RuntimeDir("a", 0, base)
    runtime.remove()
    assert not runtime.restore()
    assert not runtime.path.exists()


def test_a_folder_that_is_being_made_is_not_swept(base, tmp_path, monkeypatch):
    make = tempfile.mkdtemp

    def make_and_sweep(**where: str) -> str:
        monkeypatch.setattr(tempfile, "mkdtemp", make)
        path = make(**where)
        others.append(RuntimeDir("b", 1, base))
        return path

    others: list[RuntimeDir] = []
    monkeypatch.setattr(tempfile, "mkdtemp", make_and_sweep)
    runtime = RuntimeDir("a", 0, base)
    assert {entry.name for entry in (tmp_path / "xdg").iterdir()} == {runtime.path.name, others[0].path.name}
    assert runtime.path.name.startswith(PREFIX)


def test_an_attempt_begins_while_another_thread_restores_the_folder(base, monkeypatch):
    remove, runtime, threads = shutil.rmtree, RuntimeDir("a", 0, base), []

    def remove_and_restore(path: Path, **options: bool) -> None:
        remove(path, **options)
        threads.append(threading.Thread(target=runtime.restore))
        threads[-1].start()
        threads[-1].join(0.1)

    monkeypatch.setattr(shutil, "rmtree", remove_and_restore)
    runtime.begin_attempt()
    threads[0].join(60)
    assert not runtime.vanished


def test_a_heartbeat_of_the_attempt_before_that_is_read_late_is_forgotten(base):
    runtime = RuntimeDir("a", 0, base)
    monitor = HeartbeatMonitor(runtime, 0)
    Heart(str(runtime.path / rank_heartbeat(0))).beat(3)
    begin = runtime.begin_attempt
    runtime.begin_attempt = lambda: monitor.beat(0).step and begin()  # type: ignore[method-assign]
    journal = SimpleNamespace(state=SimpleNamespace(runtime=str(runtime.path)))
    node = SimpleNamespace(folder=SimpleNamespace(runtime=runtime), heartbeats=monitor, journal=journal)
    group = SimpleNamespace(workers=[SimpleNamespace(global_rank=0)])
    with pytest.raises(AttributeError, match="world_size"):  # the node goes no further
        NodeAgent._start_workers(SimpleNamespace(_node=node, _set_up=lambda: True, copies=None), group)
    Heart(str(runtime.path / rank_heartbeat(0))).beat(1)
    assert monitor.beat(0).step == 1
    monitor.forget()
    runtime.remove()


def test_appends_that_wait_for_the_disk_become_one_call_of_each_file(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    writer, a, b = FileWriter(fork=True), tmp_path / "a", tmp_path / "b"
    writer.start()
    blocked = writer.submit(block, tmp_path / "fifo")
    until(lambda: not writer._calls)
    for number in range(100):
        results = [writer.submit(file_writer.append, path, b"%d\n" % number, waits=True) for path in (a, b)]
    assert len(writer._calls) == 2
    replaced = writer.submit(file_writer.replace_file, a, b"new\n")
    last = writer.submit(file_writer.append, a, b"last\n")
    monkeypatch.setattr(file_writer, "MAX_PENDING_BYTES", 0)
    waiting = threading.Thread(target=writer.submit, args=(file_writer.append, b, b"more\n"), kwargs={"waits": True})
    waiting.start()
    with (tmp_path / "fifo").open("w"):
        blocked.result(60)
    waiting.join(60)
    writer.flush(60)
    assert all(result.done() for result in (*results, replaced, last))
    assert a.read_text() == "new\nlast\n"
    assert b.read_text() == "".join(f"{number}\n" for number in range(100)) + "more\n"
    assert not writer._pending_bytes


def test_a_read_behind_slow_writes_is_answered(monkeypatch):
    monkeypatch.setattr(file_writer, "READ_S", 0.3)
    writer = FileWriter(fork=True)
    writer.start()
    for _ in range(12):
        writer.submit(time.sleep, 0.05)
    assert writer.read(os.getpid, unknown=0) == writer.pid
    writer.submit(time.sleep, 60)
    assert writer.read(os.getpid, unknown=0) == 0
    os.kill(writer.pid, signal.SIGKILL)
