"""What a node refuses, and a node's folder that is in use, deleted or read-only."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests import forks

from ddprank.heartbeat import read_beat
from ddpwire.exits import Exit
from ddpwire.run_files import LOCK, rank_heartbeat, rank_metrics

# Runs ddprun in a process whose flock fails as it does there.
WITHOUT_FLOCK = """
import errno, fcntl, runpy, sys
def flock(*_): raise OSError(errno.ENOSYS, "Function not implemented")
fcntl.flock = flock
sys.argv[0:1] = []
runpy.run_module("ddprun", run_name="__main__", alter_sys=True)
"""
BEATS = """
import time
from ddpwire.script import progress
for step in range(1, 10**6):
    progress(step, total=10**6)
    time.sleep(0.02)
"""


def test_a_folder_that_is_in_use_is_refused(runs):
    first = runs.start("act.py", "all=save")
    runs.wait_until_ready(first)
    second = runs.start("act.py", "all=save")
    assert second.end() == 78
    (message,) = second.messages()
    assert "RUN/node-0" in message
    first.process.terminate()
    assert first.end() == 143


@pytest.mark.parametrize(
    ("name", "value"), [("DDP_LIFELINE_FD", "77"), ("DDP_METRICS_PORT", "abc"), ("PET_NPROC_PER_NODE", "9" * 500)]
)
def test_a_refused_node_writes_an_outcome(runs, name, value):
    runs.run_dir.mkdir(exist_ok=True)
    node = runs.start("act.py", env={"PET_NODE_RANK": "0", name: value})
    assert node.end() == 78
    assert (node.outcome().code, node.outcome().cause) == (78, "config")
    assert node.messages() == [f"ddprun: {node.outcome().message}"]
    assert name in node.outcome().message
    assert len(node.outcome().message) < 200


def test_a_deleted_folder_is_named_and_the_ranks_may_save(runs, tmp_path):
    node = runs.start("act.py", "0=save", options=("--nproc-per-node", "1"))
    runs.wait_until_ready(node)
    with (node.folder / "rank-0.log").open() as log:
        node.folder.rename(tmp_path / "away")
        assert node.end() == Exit.CANNOT_WRITE
        assert log.read().endswith("saved on SIGTERM\n")
    # In between is the reason for which the ranks are asked to save.
    assert ["RUN/node-0 was" in line for line in node.messages() if "folder" in line] == [True, False, True]
    assert runs.remaining() == []


def test_a_folder_that_cannot_be_written_is_a_bounded_exit(tmp_path):
    command = [sys.executable, "-m", "ddprun", "--run-dir", "/sys/run", __file__]  # read-only for root, too
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (Exit.CANNOT_WRITE, 1)


def test_a_node_without_file_locks_starts_and_refuses_a_second_one(tmp_path):
    (tmp_path / "wait.py").write_text("print('ready', flush=True)\nimport time\ntime.sleep(1000)\n")
    command = ["-c", WITHOUT_FLOCK, "ddprun", "--nproc-per-node=1", f"--run-dir={tmp_path / 'run'}"]
    command.append(str(tmp_path / "wait.py"))
    environ = os.environ | {"DDP_DEVICE": "cpu"}
    first = forks.start(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert first.stdout is not None
    try:
        lines = []
        for line in first.stdout:
            lines.append(line)
            if "ready" in line:
                break
        assert sum(f"{LOCK}.owner" in line for line in lines) == 1
        second = forks.run(command, env=environ, text=True)
        assert second.returncode == Exit.CONFIG, second.stderr
        assert f"process {first.pid}" in second.stderr
        owner = json.loads((tmp_path / "run/node-0" / f"{LOCK}.owner").read_text())
        assert owner["pid"] == first.pid
    finally:
        first.terminate()
        first.communicate(timeout=120)
    assert not (tmp_path / "run/node-0" / f"{LOCK}.owner").exists()


def test_a_node_whose_files_hang_still_answers_and_trains(runs, tmp_path):
    """The process that writes is stopped, as by a disk that hangs: heartbeats and metrics go on."""
    node = beating_node(runs, tmp_path)
    writer = next(pid for pid in children_of(node) if os.getsid(pid) != pid)
    os.kill(writer, signal.SIGSTOP)
    before = steps_of(node)
    runs.until(lambda: steps_of(node) > before + 20)
    os.kill(writer, signal.SIGCONT)
    os.kill(node.process.pid, signal.SIGTERM)
    node.end()
    assert not Path(runtime_of(node)).exists()


def test_a_runtime_folder_that_is_emptied_ends_nothing(runs, tmp_path):
    node = beating_node(runs, tmp_path)
    shutil.rmtree(runtime_of(node))
    runs.until(lambda: Path(runtime_of(node), rank_metrics(0)).exists())
    assert node.process.poll() is None
    os.kill(node.process.pid, signal.SIGTERM)
    node.end()
    assert runs.remaining() == []


def beating_node(runs, folder):
    """Return a node whose rank has taken steps."""
    (folder / "beats.py").write_text(BEATS)
    node = runs.start(str(folder / "beats.py"), options=("--nproc-per-node", "1"))
    runs.until(lambda: (steps_of(node) or 0) > 3)
    return node


def runtime_of(node) -> str:
    return str(json.loads((node.folder / "node.json").read_text())["runtime"])


def steps_of(node) -> int | None:
    try:
        beat = read_beat(Path(runtime_of(node), rank_heartbeat(0)))
    except (OSError, ValueError, KeyError):
        return None
    return beat.step


def children_of(node) -> list[int]:
    return [child.pid for child in psutil.Process(node.process.pid).children()]
