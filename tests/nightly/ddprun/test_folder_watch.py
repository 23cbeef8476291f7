"""A run's folder that is deleted, or whose file system does not answer, while the node runs."""

import shutil

import pytest

from ddpwire.exits import Exit


@pytest.mark.parametrize("how", ["replaced"])
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
    assert runs.remaining() == []
