"""Further notes of a launch and of the head of a spec."""

import base64
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.ddpctl.answers import Answer, perform
from tests.unit.ddpctl.kubernetes_lab import JOB, cluster, plan_of
from tests.unit.ddpctl.test_kubernetes_notes import SIZED, head

from ddpctl.command import Output
from ddpctl.job.spec import JobSpec
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.target import KubernetesTarget


def notes_of(job: JobSpec, answers: Mapping[str, Answer] | None = None) -> list[str]:
    """The notes of a launch, after the line that says where it runs."""
    target = KubernetesTarget(KubernetesOptions(workload="pytorchjob"))
    _, submission = perform(target.submit(plan_of(job), attached=True), cluster(answers))
    return submission.note.splitlines()[1:]


def test_the_head_of_a_spec_names_what_must_be_in_the_cluster(snapshot: Callable[..., None]) -> None:
    job = replace(
        SIZED,
        nodes="2",
        mounts=("pvc=checkpoints:/runs", "pvc=imagenet:/data:ro", "secret=s3:/s3", "configmap=conf:/conf"),
    )
    options = {
        "queue": "vision",
        "gang": True,
    }
    heads = (
        head(job, workload="pytorchjob", **options),
        head(replace(job, nodes="1"), workload="trainjob", **options | {"gang": False}),
        head(replace(job, mounts=job.mounts[:1]), workload="job"),
    )
    snapshot("\n\n".join("\n".join(lines) for lines in heads) + "\n", image=JOB.image)


def test_of_many_files_some_are_named_and_all_are_counted() -> None:
    files = {f"m{number:02}.py": "x" * 100 for number in range(13)} | {"train.py": ""}
    read = Output(returncode=0, value={"files": files, "left_out": []})
    line = notes_of(replace(JOB, command=("train.py",)), {"kubernetes.project": read})[0]
    names = ", ".join(f"m{number:02}.py" for number in range(10))
    assert all(fact in line for fact in ("14 files", "2 kB", f"{names} and 4 more"))


def test_a_path_of_the_machines_is_named_where_pod_security_forbids_it() -> None:
    (line,) = notes_of(replace(SIZED, mounts=("/mnt/data:/data", "pvc=ckpt:/runs")))
    assert all(fact in line for fact in ("/mnt/data", "restricted", "pvc=NAME"))


KUBECTL = shutil.which("kubectl")  # before a test's PATH is empty


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
