"""A launch on Kubernetes: what it looks at, what it lets the cluster judge, what it makes, in which order."""

import json
import re
import sys
from dataclasses import replace

import pytest
import yaml
from tests.unit.ddpctl.kubernetes_lab import JOB, KUBECTL, OK, VIEW, lines, plan_of, play, recorded
from tests.wording import Wording

from ddpctl.command import Command, Output, shell_line
from ddpctl.errors import ConfigError, NoInputError, NotStartedError, UnavailableError
from ddpctl.spec import JobSpec
from ddpctl.targets import Submission
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.target import KubernetesTarget

TARGET = KubernetesTarget(KubernetesOptions())
PYTORCH = recorded("misc/raw-apis-kubeflow-v1")
ABSENT = recorded("misc/raw-apis-missing")
UID = Output(returncode=0, stdout="af8e18f3")
NO_SECRETS = Output(
    returncode=1,
    stderr='Error from server (Forbidden): error when creating "STDIN": secrets is forbidden: User "ann" cannot create '
    'resource "secrets" in API group "" in the namespace "ml"\n',
)


def kinds(commands: tuple[Command, ...]) -> list[str]:
    return [thing["kind"] for command in commands for thing in yaml.safe_load_all(command.stdin or "")]


def submit(
    *answers: tuple[Output, ...], job: JobSpec = JOB, **options: object
) -> tuple[list[tuple[Command, ...]], Submission]:
    target = KubernetesTarget(KubernetesOptions(**options))  # type: ignore[arg-type]
    try:
        return play(target.submit(plan_of(job), attached=True), answers)
    except NotStartedError as error:
        raise error.reason from error


def test_submit_looks_judges_and_makes(wording: Wording) -> None:
    asked, submission = submit((VIEW,), (PYTORCH, ABSENT), (OK, OK, OK), (OK, OK), (UID,), (OK, OK))
    view, apis, judged, needed, job, patched = asked
    assert lines(view) == ["kubectl config view --minify -o json"]
    assert lines(apis) == [
        f"{KUBECTL} get --raw /apis/kubeflow.org/v1",
        f"{KUBECTL} get --raw /apis/trainer.kubeflow.org/v1alpha1",
    ]
    assert {command.probe for command in (*view, *apis)} == {True}
    assert lines(judged) == [f"{KUBECTL} create --dry-run=server --validate=strict -o name -f -"] * 3
    assert kinds(judged) == ["Pod", "NetworkPolicy", "PyTorchJob"]
    assert lines(needed) == [f"{KUBECTL} create --validate=strict -o name -f -"] * 2
    assert lines(job) == [f"{KUBECTL} create --validate=strict -o 'jsonpath={{.metadata.uid}}' -f -"]
    assert kinds(needed + job) == ["NetworkPolicy", "Secret", "PyTorchJob"]
    owner = '{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "digits-otter", "uid": "af8e18f3"}'
    assert lines(patched) == [
        f'{KUBECTL} patch {kind} digits-otter --type=merge --patch \'{{"metadata": {{"ownerReferences": [{owner}]}}}}\''
        for kind in ("networkpolicy", "secret")
    ]
    assert submission == Submission(
        handle={"workload": "pytorchjob", "context": "lab", "namespace": "ml", "logs": "ddpctl logs digits-otter"},
        checkpoint_dir="/runs/digits-otter/checkpoints",
        note=submission.note,
    )
    wording(submission.note)


TRAINER = Output(returncode=0, stdout='{"resources": [{"name": "trainjobs"}]}')


@pytest.mark.parametrize(
    ("apis", "schema", "kind"),
    [
        ((PYTORCH, TRAINER), (), "PyTorchJob"),
        ((ABSENT, TRAINER), ('{"runtimePatches": {}}',), "TrainJob"),
        ((ABSENT, TRAINER), ('{"podTemplateOverrides": {}}',), "Job"),
        ((ABSENT, ABSENT), (), "Job"),
    ],
    ids=["training-operator", "trainer", "old trainer", "no operator"],
)
def test_the_workload_is_what_the_cluster_serves(apis, schema, kind, wording) -> None:
    more = [(Output(returncode=0, stdout=text),) for text in schema]
    judged = (OK,) * (4 if kind == "Job" else 3)
    needed = (OK,) * (2 if kind == "PyTorchJob" else 3)
    asked, submission = submit((VIEW,), apis, *more, judged, needed, (UID,), needed)
    assert kinds(asked[-2]) == [kind]
    wording(submission.note)


def test_what_was_said_is_taken() -> None:
    asked, submission = submit(
        (VIEW,), (OK,), (OK,) * 4, (OK, OK, OK), (UID,), (OK, OK, OK), workload="job", namespace="team"
    )
    assert lines(asked[1]) == ["kubectl --context lab --namespace team --request-timeout=30s get --raw /apis/batch/v1"]
    assert [kinds(step) for step in asked] == [
        [],
        [],
        ["Pod", "Service", "NetworkPolicy", "Job"],
        ["NetworkPolicy", "Service", "Secret"],
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
    asked, _ = submit((VIEW,), (OK,), (OK, OK, OK), (OK, OK, OK), (UID,), (OK, OK, OK), workload="trainjob")
    assert [kinds(step) for step in asked[2:5]] == [
        ["Pod", "TrainingRuntime", "NetworkPolicy"],
        ["NetworkPolicy", "TrainingRuntime", "Secret"],
        ["TrainJob"],
    ]


def test_a_train_job_whose_runtime_is_not_seen_yet_is_made_again() -> None:
    unseen = Output(returncode=1, stderr='admission webhook "v" denied the request: specified trainingRuntime must be '
                    "created before the TrainJob is created")  # fmt: skip
    before = ((VIEW,), (OK,), (OK, OK, OK), (OK, OK, OK))
    asked, submission = submit(*before, (unseen,), (OK,), (unseen,), (OK,), (UID,), (OK, OK, OK), workload="trainjob")
    assert [lines(step)[0] for step in (asked[5], asked[7])] == ["sleep 1", "sleep 2"]
    assert [kinds(asked[number]) for number in (4, 6, 8)] == [["TrainJob"]] * 3
    assert submission.handle["workload"] == "trainjob"
    with pytest.raises(ConfigError):
        submit(*before, *((unseen,), (OK,)) * 4, (unseen,), (OK, OK, OK), (), workload="trainjob")


SECRET = replace(JOB, secrets=("TOKEN",), mounts=("pvc=ckpt:/runs",))


def test_a_secret_goes_through_stdin_alone(wording: Wording) -> None:
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
    wording(submission.note)


def test_a_launch_makes_the_secret_with_which_nodes_sign() -> None:
    verb = TARGET.submit(plan_of(uid="4c1f5a1e2b3d"), attached=True)
    asked, _ = play(verb, [(VIEW,), (PYTORCH, ABSENT), (OK, OK, OK), (OK, OK), (UID,), (OK, OK)])
    holder = asked[3][1]
    made = yaml.safe_load(holder.stdin)
    value = made["stringData"]["store.secret"]
    assert re.fullmatch("[0-9a-f]{64}", value)
    labels = {
        "app.kubernetes.io/managed-by": "ddpctl",
        "app.kubernetes.io/name": "digits",
        "ddpctl.run": "digits-otter",
        "ddpctl.uid": "4c1f5a1e2b3d",
    }
    assert made == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "digits-otter", "namespace": "ml", "labels": labels},
        "type": "Opaque",
        "stringData": {"store.secret": value},
    }
    assert holder.secret
    assert [command for step in asked for command in step if value in shell_line(command)] == []
    assert [command for step in asked for command in step if value in (command.stdin or "")] == [holder]


@pytest.mark.parametrize(("profile", "mode"), [("restricted", 0o440), ("rdma", 0o400)])
def test_a_pod_mounts_the_secret_if_it_exists(profile: str, mode: int) -> None:
    text = KubernetesTarget(KubernetesOptions(profile=profile)).render(plan_of())  # type: ignore[arg-type]
    spec = list(yaml.safe_load_all(text))[-1]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert spec["volumes"][-1] == {
        "name": "secret",
        "secret": {
            "secretName": "digits-otter",
            "items": [{"key": "store.secret", "path": "store.secret"}],
            "defaultMode": mode,
            "optional": True,
        },
    }
    (container,) = spec["containers"]
    assert container["volumeMounts"][-1] == {"name": "secret", "mountPath": "/etc/ddpctl", "readOnly": True}
    assert {"name": "DDP_SECRET_FILE", "value": "/etc/ddpctl/store.secret"} in container["env"]


def test_who_may_not_make_secrets_gets_a_run_that_signs_nothing(wording: Wording) -> None:
    before = (VIEW,), (OK,), (OK, OK, OK), (OK, NO_SECRETS)
    asked, submission = submit(*before, (UID,), (OK,), workload="pytorchjob")
    assert [line.split()[7] for line in lines(asked[-1])] == ["networkpolicy"]
    (warning,) = submission.table
    wording(warning)
    value = Output(returncode=0, stdout="c4nary\n")
    with pytest.raises(ConfigError) as error:
        submit((VIEW,), (OK,), (value,), *before[2:], (OK, NO_SECRETS), (), job=SECRET, workload="pytorchjob")
    assert isinstance(error.value.__cause__, NotStartedError)


def test_a_script_goes_along_with_the_files_it_needs(wording: Wording) -> None:
    job = replace(JOB, command=("./train.py", "--lr", "0.1"), cpus=4, memory="16Gi")
    listed = Output(returncode=0, stdout="train.py\0lib/model.py\0lib/secrets.py\0README.md\0")
    files = {"lib/model.py": "x = 1\n", "train.py": "import lib.model\n"}
    read = Output(returncode=0, stdout=json.dumps({"files": files, "left_out": ["lib/secrets.py"]}))
    asked, submission = submit(
        (VIEW,), (OK,), (listed,), (read,), (OK,) * 3, (OK,) * 3, (UID,), (OK,) * 3, job=job, workload="pytorchjob"
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
    wording(submission.note)


def test_a_script_that_does_not_go_along_is_missed_before_anything_is_made(wording: Wording) -> None:
    read = Output(returncode=0, stdout='{"files": {}, "left_out": []}')
    with pytest.raises(NoInputError) as error:
        submit((VIEW,), (OK,), (OK,), (read,), job=replace(JOB, command=("train.py",)), workload="pytorchjob")
    wording(error.value)


def test_a_cluster_that_does_not_answer_is_noted_for_a_workload_that_was_named(wording: Wording) -> None:
    """In a dry run this is all that tells of it; a launch ends at its next command."""
    away = recorded("bad/api-unreachable-get")
    _, submission = submit((VIEW,), (away,), (OK, OK, OK), (OK, OK), (UID,), (OK, OK), workload="pytorchjob")
    wording(submission.note)
    with pytest.raises(ConfigError) as error:
        submit((VIEW,), (ABSENT,), workload="trainjob")
    wording(error.value)


def test_a_context_that_is_not_there_is_refused_with_those_that_are(wording: Wording) -> None:
    missing = Output(returncode=1, stderr="error: cannot locate context prodd\n")
    for contexts in (Output(returncode=0, stdout="lab\nprod\n"), OK):
        with pytest.raises(ConfigError) as error:
            submit((missing,), (contexts,), context="prodd")
        wording(error.value)


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ((Output(returncode=127, stderr="kubectl: not found"),), UnavailableError),
        ((VIEW, (recorded("bad/api-unreachable-get"), ABSENT)), UnavailableError),
        ((VIEW, (PYTORCH, ABSENT), (recorded("bad/pod-restricted"), OK, OK)), ConfigError),
        ((VIEW, (PYTORCH, ABSENT), (OK, OK, recorded("bad/webhook-down"))), UnavailableError),
        ((VIEW, (PYTORCH, ABSENT), (OK, OK, recorded("bad/rbac-create"))), ConfigError),
    ],
    ids=["no kubectl", "no answer", "pod security", "webhook", "rights"],
)
def test_a_refusal_of_the_cluster_comes_before_anything_is_made(answers, kind, wording) -> None:
    steps = tuple(answer if isinstance(answer, tuple) else (answer,) for answer in answers)
    with pytest.raises(kind) as error:
        submit(*steps)
    wording(error.value)
    assert isinstance(error.value.__cause__, NotStartedError)


def test_a_job_that_cannot_be_made_takes_back_what_it_needs(wording: Wording) -> None:
    exists = recorded("bad/already-exists")
    uid, other = Output(returncode=0, stdout="4c1f5a1e2b3d"), Output(returncode=0, stdout="f00dfeed0000")
    for is_its, end in ((uid, (OK,)), (other, ()), (OK, ())):  # the last has no such label
        verb = TARGET.submit(plan_of(uid=uid.stdout), attached=True)
        next(verb)
        verb.send((VIEW,))
        verb.send((PYTORCH, ABSENT))
        verb.send((OK, OK, OK))
        verb.send((OK, OK))
        label = "'jsonpath={.metadata.labels.ddpctl\\.uid}'"
        kinds_ = ("networkpolicy", "secret")
        asks = [f"{KUBECTL} get {kind} digits-otter --ignore-not-found -o {label}" for kind in kinds_]
        assert lines(verb.send((exists,))) == asks
        deletes = [f"{KUBECTL} delete networkpolicy,secret digits-otter --ignore-not-found --wait=false"] if end else []
        assert lines(verb.send((is_its, is_its))) == deletes
        with pytest.raises(NotStartedError) as error:
            verb.send(end)
        assert isinstance(error.value.reason, ConfigError)
    wording(error.value)


def test_a_name_that_no_service_takes_is_refused_here(wording: Wording) -> None:
    target, plan = KubernetesTarget(KubernetesOptions(workload="pytorchjob")), plan_of(run="a" * 55)
    with pytest.raises(NotStartedError) as error:
        play(target.submit(plan, attached=True), [(VIEW,), (OK,)])
    assert isinstance(error.value.reason, ConfigError)
    wording(error.value)
