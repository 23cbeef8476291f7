"""The live state of ranks is in the node's own memory, and a disk that hangs does not hold up ddprun."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.fixtures.nodes import until

from ddprun.agent import NodeAgent
from ddprun.files.runtime_dir import PREFIX, RuntimeDir
from ddprun.health.heartbeat_monitor import HeartbeatMonitor
from ddprun.metrics import metrics
from ddprun.metrics.metrics import read_counters, read_rank, write_counters
from ddprun.system import file_writer
from ddprun.system.file_writer import FileWriter
from ddpwire.heartbeat import Heart
from ddpwire.run_files import METRICS, RankProcess, rank_heartbeat

COUNT = """
from prometheus_client import Counter, Histogram
Counter("ddp_steps_total", "Steps.", ("kind",)).labels(kind="a").inc(10)
Histogram("ddp_seconds", "Of mine.", buckets=(1.0, 2.0)).observe(1.5)
"""

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
    for one in (runtime, other):
        one.remove()
        assert not one.path.exists()


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
    assert monitor.step(0) == 3
    shutil.rmtree(runtime.path.parent)
    assert monitor.step(1) is None
    heart.beat(4)
    assert monitor.step(0) == 4, "its file is mapped"
    assert runtime.restore()
    assert runtime.vanished
    assert not runtime.path.exists(), "the parent is gone: nothing fails"
    runtime.begin_attempt()
    assert runtime.path.is_dir()
    monitor.forget()
    assert monitor.step(0) is None
    runtime.remove()


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
    runtime.begin_attempt = lambda: monitor.step(0) and begin()  # type: ignore[method-assign]
    journal = SimpleNamespace(state=SimpleNamespace(runtime=str(runtime.path)))
    node = SimpleNamespace(folder=SimpleNamespace(runtime=runtime), heartbeats=monitor, journal=journal)
    group = SimpleNamespace(workers=[SimpleNamespace(global_rank=0)])
    with pytest.raises(AttributeError, match="downtime"):  # the node goes no further
        NodeAgent._start_workers(SimpleNamespace(_node=node), group)
    Heart(str(runtime.path / rank_heartbeat(0))).beat(1)
    assert monitor.step(0) == 1
    monitor.forget()
    runtime.remove()


def test_counters_in_the_summary_continue_on_another_machine(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    (here / "rank-0").mkdir()
    environ = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(here / "rank-0")}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", COUNT], env=environ, check=True, timeout=60)
    write_counters(there, json.loads(json.dumps(read_counters(here))))

    def values(folder: Path) -> dict[tuple[str, ...], float]:
        samples = [one for family in read_rank(folder / "rank-0") for one in family.samples]
        return {(one.name, *one.labels.values()): one.value for one in samples if one.value}

    assert values(there) == values(here)
    environ |= {"PROMETHEUS_MULTIPROC_DIR": str(there / "rank-0")}
    subprocess.run([sys.executable, "-c", COUNT], env=environ, check=True, timeout=60)
    metrics.prepare_rank_dir(there / "rank-0")
    assert values(there)["ddp_steps_total", "a"] == 30
    assert values(there)["ddp_seconds_bucket", "2.0"] == 3


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


def test_a_console_whose_file_does_not_answer_is_left_without_a_write(tmp_path):
    with (tmp_path / "node.log").open("wb") as log:
        done = subprocess.run([sys.executable, "-c", FULL_QUEUE], stdout=log, stderr=log, timeout=60)
    assert done.returncode == 0
    assert not (tmp_path / "node.log").read_bytes()


def block(path: Path) -> None:
    with path.open():
        pass
