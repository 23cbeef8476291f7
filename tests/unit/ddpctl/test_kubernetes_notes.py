"""What is said of a run, and what stands at the head of a spec, that nobody refuses and a person should know."""

import base64
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddpctl.kubernetes_lab import JOB, OK, VIEW, plan_of, play
from tests.wording import Wording

from ddpctl.command import Output
from ddpctl.spec import JobSpec
from ddpctl.targets import Submission
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.target import KubernetesTarget

KUBECTL = shutil.which("kubectl")  # before a test's PATH is empty
UID = Output(returncode=0, stdout="af8e18f3")


def submit(*answers: tuple[Output, ...], job: JobSpec) -> Submission:
    target = KubernetesTarget(KubernetesOptions(workload="pytorchjob"))
    return play(target.submit(plan_of(job), attached=True), answers)[1]


def head(job: JobSpec, **options: Any) -> list[str]:
    text = KubernetesTarget(KubernetesOptions(**options)).render(plan_of(job, "digits"))
    return [line for line in text.splitlines() if line.startswith("#")][1:]


def test_the_head_of_a_spec_names_what_the_spec_does_not_hold(wording: Wording) -> None:
    full = replace(JOB, cpus=4, memory="16Gi")
    known = head(full)
    operator, image, _ = known
    wording("\n".join(known), image=JOB.image)
    *rest, unlimited = head(JOB)
    assert rest == known
    wording(unlimited)
    *rest, script, paths = head(replace(full, command=("train.py",), mounts=("/mnt/data:/data", "/mnt/runs:/runs")))
    assert rest == [operator, image]
    wording(script)
    wording(paths)
    assert head(replace(full, mounts=("/mnt/data:/data",)), profile="rdma") == known


def test_the_head_of_a_spec_names_what_must_be_in_the_cluster(wording: Wording) -> None:
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
    heads = (
        head(job, workload="pytorchjob", **options),
        head(replace(job, nodes="1"), workload="trainjob", **options | {"gang": False}),
        head(replace(job, mounts=job.mounts[:1]), workload="job"),
    )
    assert [len(lines) for lines in heads] == [11, 11, 3]
    for lines in heads:
        wording("\n".join(lines), image=JOB.image)


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


def test_many_files_are_counted(wording: Wording) -> None:
    files = {f"m{number:02}.py": "x" * 100 for number in range(13)} | {"train.py": ""}
    read = Output(returncode=0, stdout=json.dumps({"files": files, "left_out": []}))
    answers = (VIEW,), (OK,), (OK,), (read,), (OK, OK, OK), (OK, OK, OK), (UID,), (OK, OK, OK)
    made = submit(*answers, job=replace(JOB, command=("train.py",)))
    names = ", ".join(f"m{number:02}.py" for number in range(10))
    assert names in made.note
    wording(made.note.splitlines()[1], names=names)


def test_a_path_of_the_machine_is_named(wording: Wording) -> None:
    job = replace(JOB, mounts=("/mnt/data:/data", "pvc=ckpt:/runs"), cpus=4, memory="16Gi")
    made = submit((VIEW,), (OK,), (OK, OK, OK), (OK, OK), (UID,), (OK, OK), job=job)
    wording(made.note)
