"""A launch on Kubernetes: what it looks at, what it lets the cluster judge, what it makes, in which order."""

import json
import sys
from dataclasses import replace

import pytest
import yaml
from tests.ddpctl.kubernetes_lab import JOB, KUBECTL, OK, VIEW, lines, plan_of, play, recorded

from ddpctl.command import Command, Output, shell_line
from ddpctl.errors import ConfigError, NoInputError, UnavailableError
from ddpctl.spec import JobSpec
from ddpctl.targets import Submission
from ddpctl.targets.kubernetes import KubernetesOptions, KubernetesTarget

TARGET = KubernetesTarget(KubernetesOptions())
PYTORCH = recorded("misc/raw-apis-kubeflow-v1")
ABSENT = recorded("misc/raw-apis-missing")
UNLIMITED = "the pods have no limit of cpus and memory: the job's cpus and memory set one"
UID = Output(returncode=0, stdout="af8e18f3")


def kinds(commands: tuple[Command, ...]) -> list[str]:
    return [thing["kind"] for command in commands for thing in yaml.safe_load_all(command.stdin or "")]


def submit(
    *answers: tuple[Output, ...], job: JobSpec = JOB, **options: object
) -> tuple[list[tuple[Command, ...]], Submission]:
    target = KubernetesTarget(KubernetesOptions(**options))  # type: ignore[arg-type]
    return play(target.submit(plan_of(job), attached=True), answers)


def test_submit_looks_judges_and_makes() -> None:
    asked, submission = submit((VIEW,), (PYTORCH, ABSENT), (OK, OK, OK), (OK,), (UID,), (OK,))
    view, apis, judged, needed, job, patched = asked
    assert lines(view) == ["kubectl config view --minify -o json"]
    assert lines(apis) == [
        f"{KUBECTL} get --raw /apis/kubeflow.org/v1",
        f"{KUBECTL} get --raw /apis/trainer.kubeflow.org/v1alpha1",
    ]
    assert {command.probe for command in (*view, *apis)} == {True}
    assert lines(judged) == [f"{KUBECTL} create --dry-run=server --validate=strict -o name -f -"] * 3
    assert kinds(judged) == ["Pod", "NetworkPolicy", "PyTorchJob"]
    assert lines(needed) == [f"{KUBECTL} create --validate=strict -o name -f -"]
    assert lines(job) == [f"{KUBECTL} create --validate=strict -o 'jsonpath={{.metadata.uid}}' -f -"]
    assert kinds(needed + job) == ["NetworkPolicy", "PyTorchJob"]
    owner = '{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "digits-otter", "uid": "af8e18f3"}'
    assert lines(patched) == [
        f"{KUBECTL} patch networkpolicy digits-otter --type=merge --patch "
        f'\'{{"metadata": {{"ownerReferences": [{owner}]}}}}\''
    ]
    assert submission == Submission(
        handle={"workload": "pytorchjob", "context": "lab", "namespace": "ml", "logs": "ddpctl logs digits-otter"},
        checkpoint_dir="/runs/digits-otter/checkpoints",
        note="a PyTorchJob in namespace ml of context lab (the cluster has Kubeflow's training-operator); "
        f"checkpoints go with their pod: mounts [pvc=CLAIM:/runs] keeps them; {UNLIMITED}",
    )


TRAINER = Output(returncode=0, stdout='{"resources": [{"name": "trainjobs"}]}')


@pytest.mark.parametrize(
    ("apis", "schema", "kind", "why"),
    [
        ((PYTORCH, TRAINER), (), "PyTorchJob", "the cluster has Kubeflow's training-operator"),
        ((ABSENT, TRAINER), ('{"runtimePatches": {}}',), "TrainJob", "the cluster has Kubeflow Trainer"),
        (
            (ABSENT, TRAINER),
            ('{"podTemplateOverrides": {}}',),
            "Job",
            "the cluster's Kubeflow Trainer is older than 2.2",
        ),
        ((ABSENT, ABSENT), (), "Job", "the cluster has no operator of Kubeflow's"),
    ],
)
def test_the_workload_is_what_the_cluster_serves(apis, schema, kind, why) -> None:
    more = [(Output(returncode=0, stdout=text),) for text in schema]
    judged = (OK,) * (4 if kind == "Job" else 3)
    needed = (OK,) * (1 if kind == "PyTorchJob" else 2)
    asked, submission = submit((VIEW,), apis, *more, judged, needed, (UID,), needed)
    assert kinds(asked[-2]) == [kind]
    assert submission.note.startswith(f"a {kind} in namespace ml of context lab ({why}); ")


def test_what_was_said_is_taken() -> None:
    asked, submission = submit(
        (VIEW,), (OK,), (OK, OK, OK, OK), (OK, OK), (UID,), (OK, OK), workload="job", namespace="team"
    )
    assert lines(asked[1]) == ["kubectl --context lab --namespace team --request-timeout=30s get --raw /apis/batch/v1"]
    assert [kinds(step) for step in asked] == [
        [],
        [],
        ["Pod", "Service", "NetworkPolicy", "Job"],
        ["NetworkPolicy", "Service"],
        ["Job"],
        [],
    ]
    assert submission.handle == {
        "workload": "job",
        "context": "lab",
        "namespace": "team",
        "logs": "ddpctl logs digits-otter",
    }


def test_a_train_job_is_judged_when_its_runtime_is_there() -> None:
    asked, _ = submit((VIEW,), (OK,), (OK, OK, OK), (OK, OK), (UID,), (OK, OK), workload="trainjob")
    assert [kinds(step) for step in asked[2:5]] == [
        ["Pod", "TrainingRuntime", "NetworkPolicy"],
        ["NetworkPolicy", "TrainingRuntime"],
        ["TrainJob"],
    ]


SECRET = replace(JOB, secrets=("TOKEN",), mounts=("pvc=ckpt:/runs",))


def test_a_secret_goes_through_stdin_alone() -> None:
    value = Output(returncode=0, stdout="c4nary\n")
    asked, submission = submit(
        (VIEW,), (OK,), (value,), (OK, OK, OK), (OK, OK), (UID,), (OK, OK), job=SECRET, workload="pytorchjob"
    )
    assert lines(asked[2]) == ["printenv TOKEN"]
    seen = [command for step in asked for command in step if "c4nary" in shell_line(command)]
    assert seen == []
    (holder,) = [command for step in asked for command in step if "c4nary" in (command.stdin or "")]
    assert (holder.secret, kinds((holder,))) == (True, ["Secret"])
    env = yaml.safe_load(asked[5][0].stdin)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][
        0
    ]["env"]
    assert {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "digits-otter", "key": "TOKEN"}}} in env
    assert submission.note == "a PyTorchJob in namespace ml of context lab (as you said); " + UNLIMITED


def test_a_script_goes_along_with_the_files_it_needs() -> None:
    job = replace(JOB, command=("./train.py", "--lr", "0.1"), cpus=4, memory="16Gi")
    listed = Output(returncode=0, stdout="train.py\0lib/model.py\0lib/secrets.py\0README.md\0")
    files = {"lib/model.py": "x = 1\n", "train.py": "import lib.model\n"}
    read = Output(returncode=0, stdout=json.dumps({"files": files, "left_out": ["lib/secrets.py"]}))
    asked, submission = submit(
        (VIEW,), (OK,), (listed,), (read,), (OK, OK, OK), (OK, OK), (UID,), (OK, OK), job=job, workload="pytorchjob"
    )
    assert lines(asked[2]) == ["cd /project && git ls-files -z --cached --others --exclude-standard"]
    assert lines(asked[3]) == [
        f"cd /project && {sys.executable} -P -m ddpctl.targets.kubernetes.project '*.py' train.py"
    ]
    assert asked[3][0].stdin == listed.stdout
    project = yaml.safe_load(asked[5][1].stdin)
    assert project["data"] == {"000-model.py": "x = 1\n", "001-train.py": "import lib.model\n"}
    spec = yaml.safe_load(asked[6][0].stdin)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert [volume["configMap"] for volume in spec["volumes"] if "configMap" in volume] == [
        {
            "name": "digits-otter",
            "items": [{"key": "000-model.py", "path": "lib/model.py"}, {"key": "001-train.py", "path": "train.py"}],
        }
    ]
    assert submission.note == (
        "a PyTorchJob in namespace ml of context lab (as you said); 2 files go along, 1 kB: lib/model.py, train.py; "
        "left out, since their names say that they hold secrets: lib/secrets.py (one that the target's 'project' names "
        "itself goes along); checkpoints go with their pod: mounts [pvc=CLAIM:/runs] keeps them"
    )


def test_a_script_that_does_not_go_along_is_missed_before_anything_is_made() -> None:
    read = Output(returncode=0, stdout='{"files": {}, "left_out": []}')
    with pytest.raises(NoInputError) as error:
        submit((VIEW,), (OK,), (OK,), (read,), job=replace(JOB, command=("train.py",)), workload="pytorchjob")
    assert str(error.value) == (
        "train.py: not among the files that go along from /project: is it there, does git ignore it? "
        "An image that has it needs project: []"
    )


def test_a_cluster_that_does_not_answer_is_said_of_a_workload_that_was_named() -> None:
    """In a dry run this is all that tells of it; a launch ends at its next command."""
    away = recorded("bad/api-unreachable-get")
    _, submission = submit((VIEW,), (away,), (OK, OK, OK), (OK,), (UID,), (OK,), workload="pytorchjob")
    assert submission.note.startswith(
        "a PyTorchJob in namespace ml of context lab (as you said; the cluster was not asked: the cluster does not "
        "answer at 127.0.0.1:16999 (connection refused): is it up, is a VPN missing?); "
    )
    with pytest.raises(ConfigError) as error:
        submit((VIEW,), (ABSENT,), workload="trainjob")
    assert str(error.value) == "the cluster has no TrainJob: its operator is not installed; --kind job needs none"


def test_a_context_that_is_not_there_is_told_with_those_that_are() -> None:
    missing = Output(returncode=1, stderr="error: cannot locate context prodd\n")
    with pytest.raises(ConfigError) as error:
        submit((missing,), (Output(returncode=0, stdout="lab\nprod\n"),), context="prodd")
    assert str(error.value) == "context: kubectl has no 'prodd'; there are: lab, prod"
    with pytest.raises(ConfigError) as error:
        submit((missing,), (OK,), context="prodd")
    assert str(error.value) == "context: kubectl has no 'prodd'; there are: none"


@pytest.mark.parametrize(
    ("answers", "kind", "message"),
    [
        ((Output(returncode=127, stderr="kubectl: not found"),), UnavailableError, "kubectl is not here: install it"),
        ((VIEW, (recorded("bad/api-unreachable-get"), ABSENT)), UnavailableError, "the cluster does not answer at"),
        ((VIEW, (PYTORCH, ABSENT), (recorded("bad/pod-restricted"), OK, OK)), ConfigError, "the namespace admits only"),
        (
            (VIEW, (PYTORCH, ABSENT), (OK, OK, recorded("bad/webhook-down"))),
            UnavailableError,
            "the operator's own check",
        ),
        (
            (VIEW, (PYTORCH, ABSENT), (OK, OK, recorded("bad/rbac-create"))),
            ConfigError,
            "you may not create pytorchjobs",
        ),
    ],
)
def test_what_the_cluster_refuses_is_said_before_anything_is_made(answers, kind, message) -> None:
    steps = tuple(answer if isinstance(answer, tuple) else (answer,) for answer in answers)
    with pytest.raises(kind) as error:
        submit(*steps)
    assert str(error.value).startswith(message)
    assert error.value.nothing_started


def test_a_job_that_cannot_be_made_takes_back_what_it_needs() -> None:
    verb = TARGET.submit(plan_of(), attached=True)
    next(verb)
    verb.send((VIEW,))
    verb.send((PYTORCH, ABSENT))
    verb.send((OK, OK, OK))
    verb.send((OK,))
    assert lines(verb.send((recorded("bad/already-exists"),))) == [
        f"{KUBECTL} delete networkpolicy digits-otter --ignore-not-found --wait=false"
    ]
    with pytest.raises(ConfigError) as error:
        verb.send((OK,))
    assert str(error.value) == "running is in the namespace already: choose another --name"


def test_a_name_that_no_service_takes_is_refused_here() -> None:
    target, plan = KubernetesTarget(KubernetesOptions(workload="pytorchjob")), plan_of(run="a" * 55)
    with pytest.raises(ConfigError) as error:
        play(target.submit(plan, attached=True), [(VIEW,), (OK,)])
    assert str(error.value) == (
        f"the run's name '{'a' * 55}' has 55 characters: with the pods' own endings more than 63, "
        "which no Service takes: at most 54: choose a shorter --name"
    )
