"""What ddprun reads in every pod of every shape, with the operator's variables on top: one place for each node.

tests/cluster/test_operator_environment.py starts the same pods for real.
"""

from dataclasses import replace

import pytest
from tests.cluster.operator_environment import Pod, pods_of
from tests.unit.ddpctl.kubernetes_lab import draft_of

from ddpctl.spec import JobSpec
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddprun import node_config, options

JOB = JobSpec(name="digits", nodes="3", gpus=4, command=("train.py", "--note", "$(HOSTNAME) $$"), time_limit="12h")
ELASTIC = replace(JOB, nodes="2:3")


def read(pod: Pod) -> node_config.NodeConfig:
    return node_config.read_config(options.parse(pod.args), pod.env, {"gpu": 8, "cpu": 2}.__getitem__)


@pytest.mark.parametrize(
    ("word", "job", "given", "master", "port"),
    [
        ("pytorchjob", JOB, {}, "digits-otter-worker-0", 23456),
        ("pytorchjob", replace(JOB, port=4000), {}, "digits-otter-worker-0", 4000),
        ("pytorchjob", JOB, {"master": True}, "digits-otter-master-0", 23456),
        ("pytorchjob", replace(JOB, port=4000), {"master": True}, "digits-otter-master-0", 4000),
        ("pytorchjob", ELASTIC, {}, "digits-otter-worker-0", 23456),
        ("trainjob", JOB, {}, "digits-otter-node-0-0.digits-otter", 29500),
        ("trainjob", ELASTIC, {}, "digits-otter-node-0-0.digits-otter", 29500),
        ("job", JOB, {}, "digits-otter-0.digits-otter", 23456),
        ("job", ELASTIC, {}, "digits-otter-0.digits-otter", 23456),
    ],
)
def test_every_node_has_its_place(word: str, job: JobSpec, given: dict[str, bool], master: str, port: int) -> None:
    pods = pods_of(draft_of(job, KubernetesOptions(workload=word, **given)), word)  # type: ignore[arg-type]
    read_s = [read(pod) for pod in pods]
    assert [one.node_rank for one in read_s] == [0, 1, 2]
    assert master in pods[0].names
    for one in read_s:
        assert (one.master_addr, one.master_port, one.local_world_size) == (master, port, 4)
        assert (one.min_nodes, one.max_nodes) == (job.min_nodes, 3)
        assert one.command[-3:] == ("train.py", "--note", "$(HOSTNAME) $$")
        assert (one.run_id, str(one.run_dir)) == ("digits-otter", "/runs/digits-otter")
        assert one.checkpoint_dir == "/runs/digits-otter/checkpoints"
        assert (one.retries_network, one.join_timeout_s, one.metrics_port) == (True, 600.0, 9500)
        assert one.deadline is not None
        assert one.deadline.at == 12 * 3600  # from 0, which is now here


def test_one_node_of_each() -> None:
    alone = replace(JOB, nodes="1")
    for word in ("pytorchjob", "trainjob", "job"):
        (pod,) = pods_of(draft_of(alone, KubernetesOptions(workload=word)), word)  # type: ignore[arg-type]
        assert (read(pod).node_rank, read(pod).max_nodes) == (0, 1)
    (pod,) = pods_of(draft_of(alone, KubernetesOptions(workload="pytorchjob", master=True)), "pytorchjob")
    assert (pod.name, read(pod).node_rank) == ("digits-otter-master-0", 0)
