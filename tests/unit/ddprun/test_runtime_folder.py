"""The live state of ranks is in the node's own memory; a disk that hangs holds up nothing; locks tell who is alive."""

import errno
import fcntl
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.ddprun.test_rank_metrics import count, rank_series, samples

from ddprank.heartbeat import Heart
from ddprun import main
from ddprun.files import process_discovery
from ddprun.files.runtime_dir import PREFIX, RuntimeDir
from ddprun.health import folder_watch
from ddprun.health.folder_watch import FolderWatch
from ddprun.health.heartbeat_monitor import HeartbeatMonitor
from ddprun.metrics.metrics import RankSeries
from ddprun.system import file_writer
from ddprun.system.file_writer import FileWriter
from ddpwire import locks
from ddpwire.exits import Exit
from ddpwire.locks import Lock, Owner
from ddpwire.run_files import LOCK, METRICS, RankProcess, rank_heartbeat

FULL_QUEUE = """
import threading
from types import SimpleNamespace
from ddprun.output.console import Console
frozen = threading.Event()
console = Console("node0", files=SimpleNamespace(submit=lambda *_, **__: frozen.wait(), flush=frozen.wait))
console.log("a line")
console.drain(0.1)
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment whose XDG_RUNTIME_DIR is the only place for runtime folders that the tests look into."""
    folder = tmp_path / "xdg"
    folder.mkdir(mode=0o700)
    return {"XDG_RUNTIME_DIR": str(folder)}


def test_the_folder_is_in_the_first_place_that_can_be_written(base, tmp_path):
    runtime = RuntimeDir("night/1", 3, base)
    assert runtime.path.parent == tmp_path / "xdg"
    assert runtime.path.stat().st_mode & 0o777 == 0o700
    other = RuntimeDir("night/1", 3, {"XDG_RUNTIME_DIR": "/nonexistent"})
    assert other.path.parent == Path("/dev/shm")
    for folder in (runtime, other):
        folder.remove()
        assert not folder.path.exists()


def test_the_folder_of_a_killed_ddprun_is_swept_and_that_of_a_living_one_is_not(base, tmp_path):
    living = RuntimeDir("a", 0, base)
    killed = tmp_path / "xdg" / f"{PREFIX}b-node-0-1-x"
    (killed / METRICS).mkdir(parents=True)
    killed.chmod(0o700)
    foreign = tmp_path / "xdg" / f"{PREFIX}c-node-0-1-x"
    foreign.mkdir()
    foreign.chmod(0o755)  # not made by ddprun
    RuntimeDir("d", 0, base)
    assert living.path.exists()
    assert not killed.exists()
    assert foreign.exists()


def test_a_folder_that_vanishes_is_made_anew_and_heartbeats_of_ranks_that_run_are_still_known(base):
    runtime = RuntimeDir("a", 0, base)
    runtime.begin_attempt()
    monitor = HeartbeatMonitor(runtime, 0)
    heart = Heart(str(runtime.path / rank_heartbeat(0)))
    monitor.track((RankProcess(rank=0, local_rank=0, pid=os.getpid(), log=""),))
    heart.beat(3)
    assert monitor.beat(0).step == 3
    shutil.rmtree(runtime.path.parent)
    assert monitor.beat(1).step is None
    heart.beat(4)
    assert monitor.beat(0).step == 4, "its file is mapped"
    assert runtime.restore()
    assert runtime.vanished
    assert not runtime.path.exists(), "the parent is gone: nothing fails"
    runtime.begin_attempt()
    assert runtime.path.is_dir()
    monitor.forget()
    assert monitor.beat(0).step is None
    runtime.remove()


def test_counters_in_the_summary_continue_on_another_machine(tmp_path):
    folders = [tmp_path / "here" / "rank-0", tmp_path / "there" / "rank-0"]
    here, elsewhere_series = (rank_series(folder.parent) for folder in folders)
    for folder in folders:
        folder.mkdir(parents=True)

    def values(series: RankSeries) -> dict[tuple[str, ...], float]:
        return {name: value for name, value in samples(series).items() if value and name != ("ddp_last_step",)}

    for _ in range(2):
        count(folders[0])
    here.keep_counts()
    elsewhere_series.restore(json.loads(json.dumps(here.counts())) | {"1": {"counter_0.db": "of an older version"}})
    assert values(elsewhere_series) == values(here)
    count(folders[1])
    assert values(elsewhere_series)["ddp_steps_total", "a"] == 30
    assert values(elsewhere_series)["ddp_seconds_bucket", "2.0"] == 3


def test_no_call_waits_for_a_file_that_hangs(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    writer = FileWriter(fork=True)
    writer.start()
    blocked = writer.submit(block, tmp_path / "fifo")
    appended = writer.submit(file_writer.append, tmp_path / "log", b"one\n")
    with pytest.raises(TimeoutError):
        writer.call(os.getpid, timeout_s=0.05)
    assert not blocked.done()
    with (tmp_path / "fifo").open("w"):
        appended.result(60)
    assert (tmp_path / "log").read_text() == "one\n"
    assert writer.call(os.getpid, timeout_s=60) == writer.pid
    with pytest.raises(FileNotFoundError):
        writer.call(os.stat, tmp_path / "none")
    os.kill(writer.pid, signal.SIGKILL)
    writer.submit(file_writer.append, tmp_path / "log", b"two\n")
    assert writer.call(os.getpid) == os.getpid(), "the calls are performed here"
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_a_console_whose_file_does_not_answer_is_left_without_a_write(tmp_path):
    with (tmp_path / "node.log").open("wb") as log:
        done = subprocess.run([sys.executable, "-c", FULL_QUEUE], stdout=log, stderr=log, timeout=60)
    assert done.returncode == 0
    assert not (tmp_path / "node.log").read_bytes()


def block(path: Path) -> None:
    with path.open():
        pass


def end_watch(lock: Path) -> None:
    """Delete the file that a watch looks at, and wait for the end of its threads."""
    lock.unlink()
    for thread in threading.enumerate():
        if thread.name == "folder":
            thread.join(60)


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
        console = SimpleNamespace(log=lines.put)
        node = SimpleNamespace(folder=folder, files=FileWriter(), console=console)
        with FolderWatch(node, stop=lambda: None, give_up=given_up.put):
            yield answers, lines, given_up
        answers.set()
        end_watch(lock)


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
        node = SimpleNamespace(folder=folder, files=writer, console=SimpleNamespace(log=lines.put))
        watch = FolderWatch(node, stop=lambda: None, give_up=lines.put)
        with watch:
            calls[-1].result(60)
    end_watch(tmp_path / "ddprun.lock")
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


@pytest.fixture
def without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fail)


def elsewhere(**changes: object) -> Owner:
    return replace(Owner.of_this_process(), host="other", machine="other", **changes)


def test_a_lock_is_busy_until_its_file_is_closed(tmp_path):
    with (tmp_path / "a").open("w") as first, (tmp_path / "a").open("w") as second:
        assert locks.lock(first.fileno(), tmp_path / "a") is Lock.TAKEN
        assert locks.lock(second.fileno(), tmp_path / "a") is Lock.BUSY
        assert locks.is_locked(tmp_path / "a")
    assert not locks.is_locked(tmp_path / "a")


@pytest.mark.usefixtures("without_flock")
def test_without_locks_the_owner_of_a_file_is_known_while_it_is_alive(tmp_path):
    lock = tmp_path / LOCK
    lock.touch()
    assert not process_discovery.is_locked(tmp_path)
    Owner.of_this_process().write(lock)
    assert process_discovery.is_locked(tmp_path)
    assert locks.owner_that_writes(lock) is not None
    replace(Owner.of_this_process(), started="1").write(lock)  # the pid belongs to another process now
    assert not process_discovery.is_locked(tmp_path)
    assert locks.owner_that_writes(lock) is None
    elsewhere().write(lock)
    assert process_discovery.is_locked(tmp_path)
    elsewhere(time=time.time() - 1000).write(lock)
    assert not process_discovery.is_locked(tmp_path)
    own = Owner.of_this_process()
    assert not own.keep(lock), "another process has taken the file"
    locks.disown(lock)
    assert own.keep(lock)
    locks.disown(lock)
    assert locks.read_owner(lock) is None
