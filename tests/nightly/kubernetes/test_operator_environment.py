"""Real ddprun processes, each in a network of its own, with exactly what an operator makes of the rendered pods.

Pods of every shape train the same digits on 2 x 2 ranks. The name of node 0 is not known when node 1 starts, as in a
cluster whose DNS answers only once a pod is ready. Needs root on Linux (network namespaces).
"""

import copy
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bench import lab
from tests import forks
from tests.unit.ddpctl.kubernetes_lab import draft_of
from tests.unit.ddpctl.operator_environment import Pod, pods_of

from ddpctl.job.spec import JobSpec
from ddpctl.targets.kubernetes.manifests import WORKLOADS
from ddpctl.targets.kubernetes.options import KubernetesOptions

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip (iproute2): the pods are network namespaces"
)
PATH = os.environ["PATH"]
BOUND_S = 240.0
JOB = JobSpec(
    name="digits", nodes="2", gpus=2, device="cpu", command=("ddptrain", "--epochs", "10", "--deterministic"), grace=5
)
WEIGHTS: dict[str, str] = {}  # of the shapes that have been tried: all must agree


def elastic_policy(pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
    """What an elasticPolicy of somebody's own makes: an endpoint, MIN:MAX, and no rank."""
    out = []
    for pod in pods:
        env = copy.copy(pod.env)
        for name in ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"):
            del env[name]
        env |= {
            "PET_RDZV_ENDPOINT": "digits-otter-worker-0:23456",
            "PET_RDZV_BACKEND": "c10d",
            "PET_NNODES": "1:2",
            "PET_MAX_RESTARTS": "5",
        }
        out.append(replace(pod, env=env))
    return tuple(out)


def shapes() -> dict[str, tuple[Pod, ...]]:
    def of(word: str, job: JobSpec = JOB, **options: bool) -> tuple[Pod, ...]:
        return pods_of(draft_of(job, KubernetesOptions(workload=word, **options)), word)  # type: ignore[arg-type]

    environments = {"worker-only": of("pytorchjob"), "master-worker": of("pytorchjob", master=True)}
    environments["min-max"] = of("pytorchjob", replace(JOB, nodes="1:2"))
    environments["elastic-policy"] = elastic_policy(of("pytorchjob"))
    assert set(WORKLOADS) == {"pytorchjob", "trainjob", "job"}
    return environments | {"trainjob": of("trainjob"), "indexed-job": of("job")}


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[lab.Machine, ...]]:
    monkeypatch.setenv("PATH", PATH)
    with lab.machines(2, prefix="k8s") as made:
        yield made


def hosts(machines: tuple[lab.Machine, ...], pods: tuple[Pod, ...]) -> str:
    pairs = zip(machines, pods, strict=True)
    return "".join(f"{machine.address} {' '.join(pod.names)}\n" for machine, pod in pairs)


def train(pods: tuple[Pod, ...], machines: tuple[lab.Machine, ...]) -> str:
    """Train in these pods, on two nodes of two ranks, to 98 %. Return the hash of the weights."""
    with tempfile.TemporaryDirectory(prefix="k8s-") as runs:
        processes = []
        try:
            for machine, pod in zip(machines, pods, strict=True):
                machine.write_hosts(f"{machine.address} {' '.join(pod.names)}\n")
                env = {name: value.replace("/runs", runs) for name, value in pod.env.items()}
                variables = {
                    **env,
                    "PATH": PATH,
                    "PYTHONPATH": os.environ["PYTHONPATH"],
                    "OMP_NUM_THREADS": "1",
                }
                log = (Path(runs) / f"{pod.name}.log").open("w")
                with log:
                    processes.append(
                        forks.start_on(
                            replace(machine, name=pod.name),
                            "-m",
                            "ddprun",
                            *pod.args,
                            env=variables,
                            cwd=runs,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                        )
                    )
            deadline = time.monotonic() + BOUND_S
            while len(list(Path(runs).rglob("node.json"))) < len(pods):  # all are up; none knows node 0's name yet
                assert [process.poll() for process in processes] == [None] * len(pods)
                assert time.monotonic() < deadline, "no node.json of every node"
                time.sleep(0.1)
            for machine in machines:
                machine.write_hosts(hosts(machines, pods))
            codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        output = "".join((Path(runs) / f"{pod.name}.log").read_text() for pod in pods)
    assert codes == [0, 0], output
    assert re.search(r"world size\s+4\b", output), output
    accuracy = re.search(r"test accuracy\s+([0-9.]+) %", output)
    assert accuracy, output
    assert float(accuracy[1]) >= 98.0
    return re.findall(r"weights sha256\s+([0-9a-f]{16})", output)[0]


@pytest.mark.parametrize("shape", shapes())
def test_pods_train_to_the_weights_of_all_shapes(shape: str, machines: tuple[lab.Machine, ...]) -> None:
    WEIGHTS[shape] = train(shapes()[shape], machines)
    assert len(set(WEIGHTS.values())) == 1, WEIGHTS
