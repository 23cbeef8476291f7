"""The live state of ranks is in the node's own memory, and a disk that hangs does not hold up ddprun."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.ddprun.test_rank_metrics import count, rank_series, samples

from ddprank.heartbeat import Heart
from ddprun.files.runtime_dir import PREFIX, RuntimeDir
from ddprun.health.heartbeat_monitor import HeartbeatMonitor
from ddprun.metrics.metrics import RankSeries
from ddprun.system import file_writer
from ddprun.system.file_writer import FileWriter
from ddpwire.run_files import METRICS, RankProcess, rank_heartbeat

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
    here, there = (rank_series(folder.parent) for folder in folders)
    for folder in folders:
        folder.mkdir(parents=True)

    def values(series: RankSeries) -> dict[tuple[str, ...], float]:
        return {name: value for name, value in samples(series).items() if value and name != ("ddp_last_step",)}

    for _ in range(2):
        count(folders[0])
    here.keep_counts()
    there.restore(json.loads(json.dumps(here.counts())) | {"1": {"counter_0.db": "of an older version"}})
    assert values(there) == values(here)
    count(folders[1])
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


def test_a_console_whose_file_does_not_answer_is_left_without_a_write(tmp_path):
    with (tmp_path / "node.log").open("wb") as log:
        done = subprocess.run([sys.executable, "-c", FULL_QUEUE], stdout=log, stderr=log, timeout=60)
    assert done.returncode == 0
    assert not (tmp_path / "node.log").read_bytes()


def block(path: Path) -> None:
    with path.open():
        pass
