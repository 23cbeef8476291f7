"""What is said of a run, and what stands at the head of a spec, that nobody refuses and a person should know."""

import base64
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.ddpctl.kubernetes_lab import JOB, OK, VIEW, plan_of, play

from ddpctl.command import Output
from ddpctl.spec import JobSpec
from ddpctl.targets import Submission
from ddpctl.targets.kubernetes import KubernetesOptions, KubernetesTarget, submission

KUBECTL = shutil.which("kubectl")  # before a test's PATH is empty
UID = Output(returncode=0, stdout="af8e18f3")


def submit(*answers: tuple[Output, ...], job: JobSpec) -> Submission:
    target = KubernetesTarget(KubernetesOptions(workload="pytorchjob"))
    return play(target.submit(plan_of(job), attached=True), answers)[1]


def head(job: JobSpec, **options: Any) -> list[str]:
    text = submission.render(plan_of(job, "digits"), KubernetesOptions(**options))
    return [line for line in text.splitlines() if line.startswith("#")][1:]


OPERATOR = "# Needs Kubeflow's training-operator 1.7 to 1.9 in the cluster."
IMAGE = f"# Needs the image {JOB.image}, where every machine can pull it."
POD = "# Note: checkpoints go with their pod: mounts [pvc=CLAIM:/runs] keeps them."


def test_a_spec_says_what_it_does_not_hold() -> None:
    full = replace(JOB, cpus=4, memory="16Gi")
    assert head(full) == [OPERATOR, IMAGE, POD]
    assert head(JOB) == [
        OPERATOR,
        IMAGE,
        POD,
        "# Note: the pods have no limit of cpus and memory: the job's cpus and memory set one.",
    ]
    assert head(replace(full, command=("train.py",), mounts=("/mnt/data:/data", "/mnt/runs:/runs"))) == [
        OPERATOR,
        IMAGE,
        "# The image must have train.py in /workspace: ddpctl launch sends it as a ConfigMap, this file does not.",
        "# Note: /mnt/data, /mnt/runs are paths of each machine, which Pod Security restricted refuses: mount a claim "
        "(pvc=NAME), in a profile where other targets have a path.",
    ]
    assert head(replace(full, mounts=("/mnt/data:/data",)), profile="rdma") == [OPERATOR, IMAGE, POD]


def test_a_spec_says_what_must_be_in_the_cluster() -> None:
    job = replace(
        JOB,
        nodes="2",
        cpus=4,
        memory="16Gi",
        mounts=("pvc=checkpoints:/runs", "pvc=imagenet:/data:ro", "secret=s3:/s3", "configmap=conf:/conf"),
    )
    options = {
        "image_pull_secrets": ("registry",),
        "env_secrets": {"TOKEN": "hub/token", "OTHER": "hub/other"},
        "priority_class": "high",
        "queue": "vision",
        "gang": True,
    }
    claim = "# Needs the PersistentVolumeClaim"
    several = [
        f"{claim} checkpoints (at /runs), of a storage class that offers ReadWriteMany.",
        f"{claim} imagenet (at /data), of a storage class that offers ReadOnlyMany or ReadWriteMany.",
    ]
    rest = [
        "# Needs the Secret registry.",
        "# Needs the Secret hub.",
        "# Needs the Secret s3.",
        "# Needs the ConfigMap conf.",
        "# Needs the PriorityClass high.",
        "# Needs the queue vision.",
        "# Needs a gang scheduler that the operator was started with (--gang-scheduler-name).",
    ]
    assert head(job, workload="pytorchjob", **options) == [OPERATOR, IMAGE, *several, *rest]
    alone = [f"{claim} checkpoints (at /runs).", f"{claim} imagenet (at /data)."]
    assert head(replace(job, nodes="1"), workload="trainjob", **options | {"gang": False}) == [
        "# Needs Kubeflow Trainer 2.2 or later in the cluster.",
        IMAGE,
        *alone,
        *rest[:-1],
    ]
    assert head(replace(job, mounts=job.mounts[:1]), workload="job") == [
        "# Needs Kubernetes 1.27 or later, and no operator.",
        IMAGE,
        several[0],
    ]


@pytest.mark.skipif(KUBECTL is None, reason="needs kubectl, which makes a Secret's text")
def test_the_line_that_makes_the_secret_makes_it() -> None:
    job = replace(JOB, cpus=4, memory="16Gi", secrets=("WANDB_API_KEY", "TOKEN"))
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
    made = json.loads(done.stdout)
    assert {key: base64.b64decode(text).decode() for key, text in made["data"].items()} == values
    assert (made["metadata"]["name"], made["metadata"]["namespace"]) == ("digits", "ml")


def test_many_files_are_counted() -> None:
    files = {f"m{number:02}.py": "x" * 100 for number in range(13)} | {"train.py": ""}
    read = Output(returncode=0, stdout=json.dumps({"files": files, "left_out": []}))
    answers = (VIEW,), (OK,), (OK,), (read,), (OK, OK, OK), (OK, OK), (UID,), (OK, OK)
    made = submit(*answers, job=replace(JOB, command=("train.py",)))
    names = ", ".join(f"m{number:02}.py" for number in range(10))
    assert made.note.split("; ")[1] == f"14 files go along, 2 kB: {names} and 4 more"


def test_a_path_of_the_machine_is_named() -> None:
    job = replace(JOB, mounts=("/mnt/data:/data", "pvc=ckpt:/runs"), cpus=4, memory="16Gi")
    made = submit((VIEW,), (OK,), (OK, OK, OK), (OK,), (UID,), (OK,), job=job)
    assert made.note == (
        "a PyTorchJob in namespace ml of context lab (as you said); /mnt/data is a path of each machine, which Pod "
        "Security restricted refuses: mount a claim (pvc=NAME), in a profile where other targets have a path"
    )
