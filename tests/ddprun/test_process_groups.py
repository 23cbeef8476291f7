"""Several ranks of which none joins a process group are copies of one training: who is told, and who is not."""

import pytest

GROUP = "import torch.distributed as d\nd.init_process_group('gloo')\nd.barrier()\nd.destroy_process_group()\n"
CHILD = "import subprocess, sys\nsubprocess.run([sys.executable, sys.argv[1]], check=True)\n"
REPLACED = "import os, sys\nos.execv(sys.executable, [sys.executable, sys.argv[1]])\n"
FILE = """\
import os, sys, torch.distributed as d
d.init_process_group("gloo", init_method="file://" + sys.argv[1] + ".store", rank=int(os.environ["RANK"]), world_size=2)
"""
RPC = """\
import os, torch.distributed.rpc as rpc
rpc.init_rpc("worker" + os.environ["RANK"], rank=int(os.environ["RANK"]), world_size=2)
rpc.shutdown()
"""
NOTHING = "every rank exited with 0"


def run(runs, tmp_path, text, *options, local_world_size="2"):
    (tmp_path / "group.py").write_text(GROUP)
    (tmp_path / "script.py").write_text(text)
    node = runs.start(
        str(tmp_path / "script.py"),
        str(tmp_path / "group.py"),
        options=("--nproc-per-node", local_world_size, *options),
    )
    assert node.end() == 0
    return node


def test_copies_are_named(runs, tmp_path, wording):
    node = run(runs, tmp_path, "print(1)")
    message = node.outcome().message
    assert node.said()[-1] == f"[node0] {message}"
    wording(message)


def test_copies_on_two_nodes_are_named(runs, wording):
    nodes = runs.pair("act.py", "all=0")
    assert [node.end() for node in nodes] == [0, 0]
    assert nodes[0].outcome() == nodes[1].outcome()
    wording(nodes[0].outcome().message)


@pytest.mark.parametrize(
    ("text", "options", "local_world_size"),
    [("print(1)", (), "1"), ("print(1)", ("--exec",), "2")],
    ids=["one-rank", "executed"],
)
def test_nothing_is_said_where_it_is_right_or_not_known(runs, tmp_path, text, options, local_world_size):
    assert run(runs, tmp_path, text, *options, local_world_size=local_world_size).outcome().message == NOTHING


@pytest.mark.e2e
@pytest.mark.parametrize("text", [GROUP, CHILD, REPLACED, FILE, RPC], ids=["group", "child", "replaced", "file", "rpc"])
def test_nothing_is_said_of_ranks_that_have_met(runs, tmp_path, text):
    assert run(runs, tmp_path, text).outcome().message == NOTHING
