"""Slurm, Kubernetes, Kaggle and a rank's own variables: what they say becomes a place, or is refused by name."""

from dataclasses import asdict

import pytest

from ddprun.settings import node_config, options
from ddprun.system.errors import NodeError
from ddpwire import kaggle

TWO = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "4000"}
SLURM = {
    "SLURM_JOB_ID": "4537", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_NODEID": "1",
    "SLURM_NODELIST": "gpu[07-08]", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_GPUS_ON_NODE": "4",
}  # fmt: skip


PYTORCHJOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "bert-worker-1", "PYTHONUNBUFFERED": "1",
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "MASTER_ADDR": "bert-master-0", "MASTER_PORT": "23456",
    "PET_MASTER_ADDR": "bert-master-0", "PET_MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1",
    "PET_NODE_RANK": "1",
}  # fmt: skip


ELASTIC = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "bert-worker-2",
    "PET_RDZV_ENDPOINT": "bert-worker-0:23456", "PET_RDZV_BACKEND": "c10d", "PET_NNODES": "1:3",
    "PET_MAX_RESTARTS": "5", "PET_NPROC_PER_NODE": "2",
}  # fmt: skip


def place(master_addr, master_port, *, nodes=(2, 2), join_timeout_s=60.0, **others):
    """Return the settings of a node whose job has several nodes."""
    meeting = {"master_addr": master_addr, "master_port": master_port, "join_timeout_s": join_timeout_s}
    return {"min_nodes": nodes[0], "max_nodes": nodes[1], **meeting, **others}


ALONE_ON_SLURM = {"slurm_job": "4537", "slurm_step": "0", "by_hand": False}
ON_SLURM = place("gpu07", 61001, join_timeout_s=300.0, local_world_size=4, node_rank=1, **ALONE_ON_SLURM)
POD = {"join_timeout_s": 600.0, "retries_network": True, "by_hand": False}


def read(argv, environ):
    return asdict(
        node_config.read_config(options.parse([*argv, "train.py"]), environ, {"gpu": 0, "cpu": 6}.__getitem__)
    )


@pytest.mark.parametrize(
    ("argv", "environ", "differs"),
    [
        (
            [],
            {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29500", "RANK": "7", "WORLD_SIZE": "8"},
            place("10.0.0.9", 29500, nodes=(8, 8), node_rank=7),
        ),
        ([], SLURM, ON_SLURM),
        ([], SLURM | TWO, ON_SLURM | {"master_addr": "10.0.0.1", "master_port": 4000}),
        (["--nnodes", "1", "--nproc-per-node", "3"], SLURM, {"local_world_size": 3, **ALONE_ON_SLURM}),
        ([], SLURM | {"PET_NNODES": "1:2", "SLURM_RESTART_COUNT": "3"}, ON_SLURM | {"min_nodes": 1, "num_requeues": 3}),
        ([], PYTORCHJOB, place("bert-master-0", 23456, local_world_size=6, node_rank=1, **POD)),
        (
            [],
            ELASTIC,
            place("bert-worker-0", 23456, nodes=(1, 3), local_world_size=2, node_rank=2, max_restarts=5, **POD),
        ),
        (
            ["--nnodes", "3", "--master-addr", "job-0.job", "--master-port", "29500"],
            {"JOB_COMPLETION_INDEX": "2", "KUBERNETES_SERVICE_HOST": "10.96.0.1"},
            place("job-0.job", 29500, nodes=(3, 3), node_rank=2, **POD | {"join_timeout_s": 1200.0}),
        ),
        ([], {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, {"local_world_size": 6}),
    ],
)
def test_the_variables_of_a_launcher_become_the_place_of_a_node(argv, environ, differs, monkeypatch):
    """Only what ``differs`` is not as for a node that is told nothing. The Kaggle session's end is told elsewhere."""
    monkeypatch.setattr(kaggle, "container_start", lambda: None)
    assert read(argv, environ) == read([], {}) | differs


def test_every_slurm_task_but_the_first_of_a_node_ends_with_0():
    with pytest.raises(NodeError) as caught:
        read([], SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "1"})
    assert (caught.value.outcome.code, caught.value.outcome.cause) == (0, "ok")
