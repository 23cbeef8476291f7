"""What a rank gets of its node and launcher: variables, cores, streams and place; and what is not a training."""

import errno
import json
import os
import re
import sys
from itertools import chain
from pathlib import Path

import pytest
from tests.fixtures.nodes import RANKS

from ddprun.system.network import FREE_PORT_RANGE
from ddpwire import job_env
from ddpwire.machine import format_ranges, usable_cores


def test_a_script_that_sets_variables_before_torch_is_executed(runs, tmp_path):
    script = tmp_path / "sets.py"
    script.write_text("import os\nos.environ['OMP_NUM_THREADS'] = '3'\nprint(open('/proc/self/cmdline').read())\n")
    node = runs.start(str(script))
    assert node.end() == 0
    assert "OMP_NUM_THREADS" in "".join(node.messages())
    assert node.log(0).split("\0")[1:3] == ["-u", str(script)], "the rank has a command line of its own"


def test_what_a_rank_is_told_and_every_line_it_says(runs, monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    monkeypatch.setenv("DDP_DEVICE", "cpu")
    monkeypatch.setenv("DDP_NODES_HERE", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    node = runs.start("say.py", "--epochs", "3")
    assert node.end() == 0
    runtime = json.loads((node.folder / "node.json").read_text())["runtime"]
    for rank in (0, 1):
        first, *rest = node.log(rank).split("\n")
        program = json.loads(first)
        assert program["argv"] == ["--epochs", "3"]
        assert program["path"] == str(RANKS)
        assert program["name"] == "__main__"
        env = program["env"]
        port, threads = env.pop("MASTER_PORT"), env.pop("OMP_NUM_THREADS")
        assert int(port) > 0
        assert re.fullmatch("[0-9a-f]{32}", env.pop("TORCHELASTIC_RUN_ID"))
        assert int(threads) == max(1, usable_cores() // 4)
        lost = dict(pair.split("=") for pair in env.pop("DDP_LOST_BEFORE").split(","))
        assert {cause: float(seconds) > 0 for cause, seconds in lost.items()} == {"rendezvous": True, "at": True}
        ours = {key: value for key, value in env.items() if key.startswith(WORDS)}
        assert ours == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "2",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "1000",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": str(node.folder / f"rank-{rank}.error.json"),
            "DDP_RUN_ID": "none",
            "DDP_RUN_DIR": str(runs.run_dir),
            "DDP_CHECKPOINT_DIR": str(runs.run_dir / "checkpoints"),
            "DDP_DEVICE": "cpu",
            "DDP_ATTEMPT": "1",
            "DDP_HEARTBEAT_FILE": f"{runtime}/heartbeat/rank-{rank}",
            "DDP_EVENTS_FILE": str(node.folder / "events.jsonl"),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "=lo",
            "PROMETHEUS_MULTIPROC_DIR": f"{runtime}/metrics/rank-{rank}",
        }
        lines = ["a line in two parts", "x" * 200_000, *(f"line {n}" for n in range(2_000)), "no newline at the end"]
        assert sorted(rest) == sorted(lines)
        shown = [line for line in node.stdout.read_text().splitlines() if line.startswith(f"[node0 rank{rank}] line")]
        assert shown == [f"[node0 rank{rank}] line {number}" for number in range(2_000)]


WORDS = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "NODE_RANK", "MASTER_", "ROLE_"),
    *("TORCHELASTIC_", "DDP_", "PET_", "GLOO_", "NCCL_", "PROMETHEUS_", "TORCH_CPP", "CUDA_DEVICE", "PYTHONUNBUFFERED"),
)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_real_ranks_share_the_cores_out(runs):
    check_shares_of_cores(runs)


def check_shares_of_cores(runs, *options):
    node = runs.start("cores.py", options=("--nproc-per-node", "2", "--numa-binding", "exclusive", *options))
    assert node.end() == 0
    cores = [json.loads(line) for rank in (0, 1) for line in node.log(rank).splitlines()]
    assert cores[::2] == cores[1::2]  # the thread has the mask of its rank
    assert sorted(chain(*cores[::2])) == sorted(os.sched_getaffinity(0))
    lines = "\n".join(node.messages())
    for rank, own in enumerate(cores[::2]):
        assert f"rank {rank} on cores {format_ranges(own)}" in lines


def test_ddprun_forks_unless_it_is_told_to_execute_or_a_fork_would_be_another_program(runs, tmp_path):
    (tmp_path / "script.py").write_text("import gc; print(gc.get_freeze_count() > 5000)")
    for options, hidden in (((), ""), (("--exec",), ""), ((), "queue.py")):
        (tmp_path / hidden).touch()
        node = runs.start(str(tmp_path / "script.py"), options=options)
        assert node.end() == 0
    assert node.log(0) == "True\nFalse\nFalse\n"
    assert any(f"{tmp_path}/queue.py" in line for line in node.messages())


ENV = {"HOME": "/elsewhere", "PATH": "", "UID": "7", "PS4": "'+ \"\n", "LD_BIND_NOW": "1", "DDP_PUSHGATEWAY": ""}


def test_a_rank_sees_them_and_so_does_ddprun_from_its_start(runs):
    node = runs.start("environment.py", *ENV, "DDP_JOB_ENV", env=job_env.pack(ENV))
    assert node.end() == 0
    path = f"{Path(sys.executable).parent}:{os.defpath}"  # an empty PATH counts as none
    assert json.loads(node.log(0)) == {**ENV, "PATH": path, "DDP_PUSHGATEWAY": None, "DDP_JOB_ENV": None}


def test_two_ranks_that_never_meet_are_named_as_copies(runs, tmp_path):
    (tmp_path / "script.py").write_text("print(1)")
    node = runs.start(str(tmp_path / "script.py"), options=("--nproc-per-node", "2"))
    assert node.end() == 0
    message = node.outcome().message
    assert node.messages()[-1] == f"[node0] {message}"
    assert "2 ranks" in message
    assert "init_process_group" in message


def test_a_script_that_cannot_be_started(runs):
    node = runs.start("nothing.sh", options=("--no-python",))
    assert node.end() == 127
    assert f"{RANKS}/nothing.sh: {os.strerror(errno.ENOENT)}" in node.log(0)


@pytest.mark.parametrize("files", [(".lock",), (".lock", "last.pt")], ids=["empty", "checkpoint"])
def test_a_resumed_run_without_a_checkpoint_says_so(runs, tmp_path, files):
    (tmp_path / "night").mkdir()
    for name in files:
        (tmp_path / "night" / name).touch()
    env = {"DDP_CHECKPOINT_DIR": str(tmp_path / "night")}
    node = runs.start("act.py", "all=0", options=("--resumes", "night"), env=env)
    assert node.end() == 0
    named = [line for line in node.messages() if f"{tmp_path}/night" in line and "'night'" in line]
    assert len(named) == (len(files) == 1)


def pet(node: int, port: int) -> dict[str, str]:
    """Return what ddpctl and Kubeflow's operators set."""
    place = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    return {"PET_NNODES": "2", "PET_NODE_RANK": str(node), **place}


def plain(node: int, port: int) -> dict[str, str]:
    """Return what a launcher of single ranks sets."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(node), "WORLD_SIZE": "2"}


def slurm(node: int, port: int) -> dict[str, str]:
    """Return what srun sets. The port follows from the number of the job."""
    job = {"SLURM_JOB_ID": str(FREE_PORT_RANGE.index(port)), "SLURM_NNODES": "2", "SLURM_NODELIST": "127.0.0.1"}
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
    return {**job, **step, "SLURM_NODEID": str(node), "RANK": "7", "WORLD_SIZE": "9"}


def kubeflow(node: int, port: int) -> dict[str, str]:
    """Return what the training operator sets in a pod of a PyTorchJob."""
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": f"bert-worker-{node}"}
    return {**pod, **plain(node, port), **pet(node, port)}


def elastic(node: int, port: int) -> dict[str, str]:
    """Return what the training operator sets in a pod of an elastic PyTorchJob."""
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": f"bert-worker-{node}"}
    return {**pod, "PET_NNODES": "2:2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}"}


def torchrun(node: int, port: int) -> dict[str, str]:
    """Return the same variables on both nodes: the nodes take their numbers when they meet."""
    return {name: value for name, value in elastic(node, port).items() if name.startswith("PET_")}


@pytest.mark.parametrize("launcher", [pet, plain, slurm, kubeflow, elastic, torchrun], ids=lambda value: value.__name__)
def test_the_ranks_of_two_nodes_get_one_world(runs, launcher):
    port = runs.free_port()
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR")
    nodes = [runs.start("environment.py", *names, env=launcher(node, port)) for node in (0, 1)]
    assert [node.end() for node in nodes] == [0, 0], [node.messages() for node in nodes]
    worlds = [json.loads((runs.run_dir / f"node-{node}" / f"rank-{node}.log").read_text()) for node in (0, 1)]
    assert [tuple(world.values()) for world in worlds] == [(str(n), "0", str(n), "2", "127.0.0.1") for n in (0, 1)]
