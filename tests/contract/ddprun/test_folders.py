"""What a node refuses, and a node's folder that is in use, deleted or read-only."""

import subprocess
import sys

import pytest

from ddpwire.exits import Exit


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
    assert ["RUN/node-0 was" in line for line in node.messages() if "folder" in line] == [True, True]
    assert runs.remaining() == []


def test_a_folder_that_cannot_be_written_is_a_bounded_exit(tmp_path):
    command = [sys.executable, "-m", "ddprun", "--run-dir", "/sys/run", __file__]  # read-only for root, too
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (Exit.CANNOT_WRITE, 1)
