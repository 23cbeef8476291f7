"""What a run's notes and the head of a spec name: what must be in the cluster, and what is not kept."""

import base64
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddpctl.kubernetes_lab import JOB, plan_of

from ddpctl.job.spec import JobSpec
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.target import KubernetesTarget

KUBECTL = shutil.which("kubectl")  # before a test's PATH is empty


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


@pytest.mark.skipif(KUBECTL is None, reason="needs kubectl, which makes a Secret's text")
def test_the_command_in_the_head_of_a_spec_creates_its_secret() -> None:
    job = replace(SIZED, secrets=("WANDB_API_KEY", "TOKEN"))
    (line,) = (line for line in head(job, namespace="ml", context="lab of mine") if "First" in line)
    assert line == (
        "# First: printf '%s\\n' \"WANDB_API_KEY=$WANDB_API_KEY\" \"TOKEN=$TOKEN\" | kubectl --context 'lab of mine' "
        "--namespace ml create secret generic digits --from-env-file=/dev/stdin"
    )
    (line,) = (line for line in head(job, namespace="ml") if "First" in line)
    values = {"WANDB_API_KEY": "a b'\"$HOME", "TOKEN": "=x"}
    command = line.removeprefix("# First: ") + " --dry-run=client -o json"
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        env={"PATH": str(Path(str(KUBECTL)).parent), **values},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    secret = json.loads(done.stdout)
    assert {key: base64.b64decode(text).decode() for key, text in secret["data"].items()} == values
    assert (secret["metadata"]["name"], secret["metadata"]["namespace"]) == ("digits", "ml")
