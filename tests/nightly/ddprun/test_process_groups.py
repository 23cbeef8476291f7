"""Several ranks of which none joins a process group are copies of one training: who is told, and who is not."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist
from bench.measuring import free_port
from tests.unit.ddprun import test_process_groups
from tests.unit.ddprun.test_process_groups import place

from ddprun.ranks.process_groups import DebugStore

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


def test_copies_on_two_nodes_are_named(runs):
    nodes = runs.pair("act.py", "all=0")
    assert [node.end() for node in nodes] == [0, 0]
    assert nodes[0].outcome() == nodes[1].outcome()
    assert "init_process_group" in nodes[0].outcome().message


@pytest.mark.parametrize(
    ("text", "options", "local_world_size"),
    [("print(1)", (), "1"), ("print(1)", ("--exec",), "2")],
    ids=["one-rank", "executed"],
)
def test_nothing_is_said_where_it_is_right_or_not_known(runs, tmp_path, text, options, local_world_size):
    assert run(runs, tmp_path, text, *options, local_world_size=local_world_size).outcome().message == NOTHING


@pytest.mark.parametrize("text", [GROUP, CHILD, REPLACED, FILE, RPC], ids=["group", "child", "replaced", "file", "rpc"])
def test_nothing_is_said_of_ranks_that_have_met(runs, tmp_path, text):
    assert run(runs, tmp_path, text).outcome().message == NOTHING


NO_BACKEND = """\
import os, signal, torch.distributed as d
import ddpwire.script as ddp
d.init_process_group()  # without a GPU, get_backend() of a CUDA build is "undefined"
for step in range(1, 10**9):
    ddp.progress(step, loss=0.5)
    if step == 9 and d.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if ddp.should_stop():
        print(f"stops after step {step}", flush=True)
        ddp.stop()
"""


def test_ranks_without_a_named_backend_agree_on_the_step_after_which_they_stop(runs, tmp_path):
    (tmp_path / "script.py").write_text(NO_BACKEND)
    node = runs.start(str(tmp_path / "script.py"), options=("--nproc-per-node", "2"))
    assert node.end() == 143
    steps = [re.findall(r"stops after step (\d+)", node.log(rank)) for rank in (0, 1)]
    assert [len(numbers) for numbers in steps] == [1, 1]
    assert steps[0] == steps[1]


# Scripts that choose the place of their processes themselves, on each of two ranks.

SPAWN = """\
import os, sys, time
from multiprocessing.connection import wait
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, port):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    while os.environ["WORLD_SIZE"] == "2":  # until the other rank has started its own
        time.sleep(1)

if __name__ == "__main__":
    mp.spawn(train, args=(sys.argv[2],), nprocs=2)
"""
FORK = SPAWN.replace(
    "mp.spawn(train, args=(sys.argv[2],), nprocs=2)",
    """\
ranks = [mp.get_context("fork").Process(target=train, args=(rank, sys.argv[2])) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    wait([rank.sentinel for rank in ranks])
    for rank in ranks:
        rank.terminate()
    sys.exit(1)""",
)
COPIES = """\
import os, sys, torch.distributed as dist
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": sys.argv[2]}
dist.init_process_group("gloo", rank=0, world_size=2)
"""
HARMLESS = """\
import os, socket, subprocess, sys, tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.tensor(index)

def meet(index, method, first, size):  # of the rank's own, or of all ranks
    dist.init_process_group("gloo", init_method=method, rank=first + index, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    dist.destroy_process_group()

def meet_often(index, rank, port, folder):
    meet(index, f"tcp://127.0.0.1:{port}", 0, 2)
    meet(index, f"file://{folder}/meet", 0, 2)
    meet(index, "env://", 2 * rank, 4)  # as ImageNet's example has it

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    for context in ("fork", "spawn", "forkserver"):
        assert sum(map(int, DataLoader(Numbers(), num_workers=1, multiprocessing_context=context))) == 6
    subprocess.run([sys.executable, "-c", "print(1)"], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(meet_often, args=(rank, port, folder), nprocs=2)
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = sys.argv[2]
    meet(rank, None, 0, 2)
"""
# Where an agent is said to serve the store, nobody serves one at an address of the script's own; and a second group
# there would find the addresses of the first. What is told of executed ranks depends on processes that are spawned.
WITHOUT_ADDRESSES = re.sub(r'.*(tcp://|os\.environ\["MASTER|meet\(rank, None).*\n', "", HARMLESS)
WITHOUT_ADDRESSES = WITHOUT_ADDRESSES.replace('("fork", "spawn", "forkserver")', '("spawn",)')


def own_places(runs, tmp_path, text, *options, local_world_size="2"):
    script = tmp_path / "places.py"
    script.write_text(text)
    port = str(runs.free_port())
    node = runs.start(str(script), "argument", port, options=("--nproc-per-node", local_world_size, *options))
    return node, node.end(), port


@pytest.mark.parametrize("text", [SPAWN, FORK, COPIES], ids=["spawn", "fork", "copies"])
def test_two_ranks_that_claim_one_place_are_told_so(runs, tmp_path, text):
    node, code, port = own_places(runs, tmp_path, text)
    assert (code, node.outcome().cause) == (1, "error"), node.messages()
    (line, *_) = re.findall(r"^RuntimeError: .*call init_process_group as.*", node.log(0) + node.log(1), re.M)
    assert "ranks 0 and 1" in line
    assert f"localhost:{port}" in line
    assert runs.remaining() == []


def test_executed_ranks_that_start_ranks_of_their_own_are_told_so(runs, tmp_path):
    node, code, _ = own_places(runs, tmp_path, SPAWN, "--exec")
    assert (code, node.outcome().cause) == (1, "error"), node.messages()
    assert "ranks 0 and 1" in node.outcome().message
    assert runs.remaining() == []


@pytest.mark.parametrize(
    ("text", "options"), [(HARMLESS, ()), (WITHOUT_ADDRESSES, ("--exec",))], ids=["forked", "executed"]
)
def test_nothing_is_said_of_processes_whose_places_differ(runs, tmp_path, text, options):
    node, code, _ = own_places(runs, tmp_path, text, *options)
    assert (code, node.outcome().message) == (0, NOTHING), node.log(0) + node.log(1)
    assert not any("started with exec" in line for line in node.messages())  # without --exec they are forks


def test_one_rank_starts_its_own_ranks(runs, tmp_path):
    node, code, _ = own_places(runs, tmp_path, SPAWN, local_world_size="1")
    assert (code, node.outcome().message) == (0, NOTHING), node.log(0)


environment = test_process_groups.environment  # the fixture


def test_a_debug_server_and_the_process_group_of_a_single_rank_share_the_store(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, finder = free_port(), DebugStore()
    monkeypatch.setenv("MASTER_PORT", str(port))
    finder.find_spec("torch.distributed.debug._store")
    finder.find_spec("torch.distributed.debug")
    dist.TCPStore("127.0.0.1", port, is_master=False).set("key", "value")
    assert dist.TCPStore("127.0.0.1", port, 1, True, multi_tenant=True).get("key") == b"value"  # as a group makes it


@pytest.mark.usefixtures("environment")
def test_ranks_may_exchange_their_places_in_a_later_group(tmp_path: Path) -> None:
    rank = place(0, tmp_path)
    for number in (0, 1, 0):
        rank.check("env://", number, 2)
    assert len({*tmp_path.iterdir()}) == 3
    for number in (0, 1):  # each rank has groups of its own
        place(number, tmp_path).check("env://", 0, 1)
    assert len({*tmp_path.iterdir()}) == 3
