"""A run's folder that is deleted, or whose file system does not answer, while the node runs."""

import shutil
import subprocess
import sys

import pytest

from ddpwire.exits import Exit


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_deleted_folder_is_named_and_the_ranks_may_save(runs, tmp_path, how):
    node = runs.start("act.py", "0=save", options=("--nproc-per-node", "1"))
    runs.wait_until_ready(node)
    with (node.folder / "rank-0.log").open() as log:
        node.folder.rename(tmp_path / "away")
        if how == "replaced":
            shutil.copytree(tmp_path / "away", node.folder)
        assert node.end() == Exit.CANNOT_WRITE
        assert log.read().endswith("saved on SIGTERM\n")
    assert ["RUN/node-0 was" in line for line in node.messages() if "folder" in line] == [True, True]
    assert runs.nothing_is_left()


def test_a_folder_that_cannot_be_written_is_a_bounded_exit(tmp_path):
    command = [sys.executable, "-m", "ddprun", "--run-dir", "/sys/run", __file__]  # read-only for root, too
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (Exit.CANNOT_WRITE, 1)
