"""What the tests of the target kubernetes share: recorded answers, a job, a run and its objects."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.unit.ddpctl import records
from tests.unit.ddpctl.answers import Answer

from ddpctl.command import Command, Output, shell_line
from ddpctl.job.launch_plan import Plan
from ddpctl.job.spec import JobSpec
from ddpctl.runs.run_store import Run
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.pod import Draft

DATA = Path(__file__).parents[2] / "data" / "kubernetes"
JOB = JobSpec(name="digits", nodes="2", gpus=2)
OK = Output(returncode=0)
KUBECTL = "kubectl --context lab --namespace ml --request-timeout=30s"
VIEW = Output(
    returncode=0,
    stdout=json.dumps(
        {"current-context": "lab", "contexts": [{"name": "lab", "context": {"cluster": "c", "namespace": "ml"}}]}
    ),
)


def recorded(path: str) -> Output:
    """An answer as it was recorded: what stands in PATH.json or PATH.stdout.txt, or the failure in PATH.stderr.txt."""
    for ending in (".json", ".stdout.txt"):
        if (DATA / (path + ending)).exists():
            return Output(returncode=0, stdout=(DATA / (path + ending)).read_text())
    return Output(returncode=1, stderr=(DATA / f"{path}.stderr.txt").read_text())


# Answers of a cluster with Kubeflow's training-operator, by a part of the command line; see answers.perform.
CLUSTER = {
    "config view": VIEW,
    "/apis/kubeflow.org": recorded("misc/raw-apis-kubeflow-v1"),
    "/apis/trainer": recorded("misc/raw-apis-missing"),
    "jsonpath={.metadata.uid}": Output(returncode=0, stdout="af8e18f3"),
}


def cluster(answers: Mapping[str, Answer] | None = None) -> dict[str, Answer]:
    """The answers of CLUSTER, after those that are given."""
    given = answers or {}
    return {**given, **{part: output for part, output in CLUSTER.items() if part not in given}}


def plan_of(job: JobSpec = JOB, run: str = "digits-otter", uid: str = "") -> Plan:
    folder = f"/state/{run}"
    return Plan(name=run, job=job, cwd="/project", folder=folder, checkpoint_dir=f"{folder}/checkpoints", uid=uid)


def draft_of(job: JobSpec = JOB, options: KubernetesOptions | None = None, **rest: Any) -> Draft:
    return Draft(plan=plan_of(job), options=options or KubernetesOptions(), project={}, **rest)


def run_of(name: str = "digits-otter", *, job: JobSpec = JOB, workload: str = "pytorchjob", **options: Any) -> Run:
    handle = {"workload": workload, "context": "lab", "namespace": "ml"}
    return records.run_of(name, kind="kubernetes", options=options, job=job, folder=f"/state/{name}", handle=handle)


def as_run(path: str, run: str, old: str) -> Output:
    """A recorded list or object, as if it had been of our run: with its label and its name."""
    output = recorded(path)
    answer = json.loads(output.stdout.replace(f'"{old}-', f'"{run}-').replace(f': "{old}"', f': "{run}"'))
    for thing in answer.get("items", [answer]):
        thing.setdefault("metadata", {}).setdefault("labels", {})["ddpctl.run"] = run
    return replace(output, stdout=json.dumps(answer))


def lines(commands: Iterable[Command]) -> list[str]:
    """Each command on one line: what it reads is told by its kinds."""
    return [shell_line(replace(command, stdin=None)) for command in commands]


def expand(text: str) -> str:
    """As the kubelet does it, where no variable is known (k8s.io/kubernetes third_party/forked/golang/expansion)."""
    out, at = "", 0
    while at < len(text):
        if text[at] == "$" and at + 1 < len(text):
            if text[at + 1] == "$":
                out, at = out + "$", at + 2
                continue
            if text[at + 1] == "(" and ")" in text[at:]:
                return out + "EXPANDED"
        out, at = out + text[at], at + 1
    return out
