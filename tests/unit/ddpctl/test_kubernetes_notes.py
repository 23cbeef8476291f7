"""What a run's notes and the head of a spec name: what must be in the cluster, and what is not kept."""

from dataclasses import replace
from typing import Any

from tests.unit.ddpctl.kubernetes_lab import JOB, plan_of

from ddpctl.job.spec import JobSpec
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.target import KubernetesTarget


def head(job: JobSpec, **options: Any) -> list[str]:
    text = KubernetesTarget(KubernetesOptions(**options)).render(plan_of(job, "digits"))
    return [line for line in text.splitlines() if line.startswith("#")][1:]


SIZED = replace(JOB, cpus=4, memory="16Gi")


def test_the_head_of_a_spec_names_what_the_spec_does_not_hold() -> None:
    operator, image, checkpoints = usual = head(SIZED)
    assert "training-operator" in operator
    assert JOB.image in image
    assert "pvc=CLAIM:/runs" in checkpoints
    *rest, unlimited = head(JOB)
    assert rest == usual
    assert "cpus and memory" in unlimited
    *rest, script, paths = head(replace(SIZED, command=("train.py",), mounts=("/mnt/data:/data", "/mnt/runs:/runs")))
    assert rest == [operator, image]
    assert "train.py in /workspace" in script
    assert "/mnt/data, /mnt/runs" in paths
    assert head(replace(SIZED, mounts=("/mnt/data:/data",)), profile="rdma") == usual
