"""Two ddpruns in the environment of each launcher: their ranks get one world."""

import json

import pytest

from ddprun.system.network import FREE_PORT_RANGE


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
