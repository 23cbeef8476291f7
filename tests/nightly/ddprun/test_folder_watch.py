"""A run's folder that is deleted, or whose file system does not answer, while the node runs."""

import os
import shutil
import signal

import psutil
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


def test_a_node_whose_disk_does_not_answer_ends_all_nodes_with_its_reason(runs):
    nodes = runs.pair("act.py")
    runs.wait_until_ready(*nodes)
    children = psutil.Process(nodes[1].process.pid).children()
    (writer,) = [child for child in children if os.getsid(child.pid) != child.pid]
    writer.send_signal(signal.SIGSTOP)  # bench/frozen_disk.py freezes a real disk
    try:
        assert [node.end() for node in nodes] == [Exit.CANNOT_WRITE] * 2
    finally:
        writer.send_signal(signal.SIGCONT)
    outcome = nodes[0].outcome()
    assert (outcome.code, outcome.node, str(nodes[1].folder) in outcome.message) == (Exit.CANNOT_WRITE, 1, True)
