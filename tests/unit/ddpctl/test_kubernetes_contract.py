"""What ddprun reads in every pod of every shape, after the operator has added its variables: each node has its rank.

tests/nightly/kubernetes/test_operator_environment.py starts the same pods for real.
"""

from dataclasses import replace

import pytest
from tests.unit.ddpctl.kubernetes_lab import draft_of
from tests.unit.ddpctl.operator_environment import Pod, pods_of

from ddpctl.job.spec import JobSpec
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddprun.settings import node_config, options

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
def test_every_pod_has_its_node_rank_and_settings(
    word: str, job: JobSpec, given: dict[str, bool], master: str, port: int
) -> None:
    pods = pods_of(draft_of(job, KubernetesOptions(workload=word, **given)), word)  # type: ignore[arg-type]
    configs = [read(pod) for pod in pods]
    assert [config.node_rank for config in configs] == [0, 1, 2]
    assert master in pods[0].names
    join_timeout_s = 600.0 if word == "pytorchjob" else 1200.0  # a Job delays new pods
    for config in configs:
        assert (config.master_addr, config.master_port, config.local_world_size) == (master, port, 4)
        assert (config.min_nodes, config.max_nodes) == (job.min_nodes, 3)
        assert config.command[-3:] == ("train.py", "--note", "$(HOSTNAME) $$")
        assert (config.run_id, str(config.run_dir)) == ("digits-otter", "/runs/digits-otter")
        assert config.checkpoint_dir == "/runs/digits-otter/checkpoints"
        assert (config.retries_network, config.join_timeout_s, config.metrics_port) == (True, join_timeout_s, 9500)
        assert config.deadline is not None
        assert config.deadline.at == 12 * 3600  # from 0, which is now here


def test_the_only_pod_of_each_workload_is_node_0() -> None:
    alone = replace(JOB, nodes="1")
    for word in ("pytorchjob", "trainjob", "job"):
        (pod,) = pods_of(draft_of(alone, KubernetesOptions(workload=word)), word)  # type: ignore[arg-type]
        assert (read(pod).node_rank, read(pod).max_nodes) == (0, 1)
    (pod,) = pods_of(draft_of(alone, KubernetesOptions(workload="pytorchjob", master=True)), "pytorchjob")
    assert (pod.name, read(pod).node_rank) == ("digits-otter-master-0", 0)
