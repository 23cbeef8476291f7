"""A launch on Kubernetes: what it asks, has the cluster validate, and creates in which order; what its notes name."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.messages import assert_names
from tests.unit.ddpctl.answers import Answer, matching, only, perform
from tests.unit.ddpctl.kubernetes_lab import JOB, KUBECTL, OK, cluster, lines, plan_of, recorded

from ddpctl.command import Command, Output, shell_line
from ddpctl.errors import ConfigError, DdpctlError, NoInputError, UnavailableError
from ddpctl.job.spec import JobSpec
from ddpctl.targets import Submission
from ddpctl.targets.kubernetes import project as reader
from ddpctl.targets.kubernetes.options import DEFAULT_PROJECT, KubernetesOptions
from ddpctl.targets.kubernetes.target import KubernetesTarget

ABSENT = recorded("misc/raw-apis-missing")
UNREACHABLE = recorded("bad/api-unreachable-get")
DRY_RUN, CREATE, OF_JOB = "create --dry-run=server", "create --validate=strict", "jsonpath={.metadata.uid}"
NO_SECRETS = Output(
    returncode=1,
    stderr='Error from server (Forbidden): error when creating "STDIN": secrets is forbidden: User "ann" cannot create '
    'resource "secrets" in API group "" in the namespace "ml"\n',
)


SECRET = replace(JOB, secrets=("TOKEN",), mounts=("pvc=ckpt:/runs",))
UID, OTHER_UID = (Output(returncode=0, stdout=text) for text in ("4c1f5a1e2b3d", "f00dfeed0000"))
SIZED = replace(JOB, cpus=4, memory="16Gi")


def kinds(commands: Iterable[Command]) -> list[str]:
    return [thing["kind"] for command in commands for thing in yaml.safe_load_all(command.stdin or "")]


def refused(kind: str, output: Output) -> Answer:
    """The cluster's answer to the creation of several objects: it refuses those of this kind."""
    return lambda command: output if f"kind: {kind}\n" in (command.stdin or "") else OK


def submit(
    answers: Mapping[str, Answer] | None = None,
    *,
    job: JobSpec = JOB,
    uid: str = "",
    commands: list[Command] | None = None,
    **options: Any,
) -> tuple[list[Command], Submission]:
    target = KubernetesTarget(KubernetesOptions(**options), {"TOKEN": "c4nary"})
    return perform(target.submit(plan_of(job, uid=uid), attached=True), cluster(answers), commands)


def error_of(answers: Mapping[str, Answer], **rest: Any) -> tuple[list[Command], DdpctlError]:
    """The commands of a launch that starts nothing, and its reason."""
    commands: list[Command] = []
    with pytest.raises(DdpctlError) as error:
        submit(answers, commands=commands, **rest)
    assert error.value.fields.get("is_undone", False) == any(command.starts for command in commands)
    return commands, error.value


def container_of(commands: list[Command]) -> dict[str, Any]:
    pod = pod_of(commands)
    (container,) = pod["containers"]
    return dict(container)


def pod_of(commands: list[Command]) -> dict[str, Any]:
    job = yaml.safe_load(only(commands, OF_JOB).stdin or "")
    return dict(job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"])


def test_a_launch_has_its_objects_validated_before_it_creates_them_and_makes_the_job_their_owner() -> None:
    commands, submission = submit()
    looks, judged, created = matching(commands, "--raw"), matching(commands, DRY_RUN), matching(commands, CREATE)
    assert lines(matching(commands, "config view")) == ["kubectl config view --minify -o json"]
    assert lines(looks) == [
        f"{KUBECTL} get --raw /apis/kubeflow.org/v1",
        f"{KUBECTL} get --raw /apis/trainer.kubeflow.org/v1alpha1",
    ]
    assert {command.probe for command in looks} == {True}
    assert lines(judged) == [f"{KUBECTL} create --dry-run=server --validate=strict -o name -f -"] * 3
    assert kinds(judged) == ["Pod", "NetworkPolicy", "PyTorchJob"]
    assert lines(created) == [
        *[f"{KUBECTL} create --validate=strict -o name -f -"] * 2,
        f"{KUBECTL} create --validate=strict -o 'jsonpath={{.metadata.uid}}' -f -",
    ]
    assert kinds(created) == ["NetworkPolicy", "Secret", "PyTorchJob"]
    owner = '{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "digits-otter", "uid": "af8e18f3"}'
    patched = matching(commands, " patch ")
    assert lines(patched) == [
        f'{KUBECTL} patch {kind} digits-otter --type=merge --patch \'{{"metadata": {{"ownerReferences": [{owner}]}}}}\''
        for kind in ("networkpolicy", "secret")
    ]
    assert commands[-8:] == [*judged, *created, *patched]
    handle = {"workload": "pytorchjob", "context": "lab", "namespace": "ml", "logs": "ddpctl logs digits-otter"}
    assert (submission.handle, submission.checkpoint_dir) == (handle, "/runs/digits-otter/checkpoints")
    assert all(fact in submission.note for fact in ("PyTorchJob", "training-operator", "namespace ml", "context lab"))
    assert "pvc=CLAIM:/runs" in submission.note, "the checkpoints are lost with their pods"
    assert "cpus and memory" in submission.note


TRAINER = Output(returncode=0, stdout='{"resources": [{"name": "trainjobs"}]}')


@pytest.mark.parametrize(
    ("answers", "kind", "reason"),
    [
        ({"/apis/trainer": TRAINER}, "PyTorchJob", "training-operator"),
        ({"/openapi": Output(returncode=0, stdout='{"runtimePatches": {}}'), "/apis/kubeflow.org": ABSENT,
          "/apis/trainer": TRAINER}, "TrainJob", "Kubeflow Trainer"),
        ({"/openapi": Output(returncode=0, stdout="{}"), "/apis/kubeflow.org": ABSENT, "/apis/trainer": TRAINER}, "Job",
         "older than 2.2"),
        ({"/apis/kubeflow.org": ABSENT}, "Job", "no Kubeflow operator"),
    ],
    ids=["training-operator", "trainer", "old trainer", "no operator"],
)  # fmt: skip
def test_the_workload_is_what_the_cluster_serves(answers: Mapping[str, Output], kind: str, reason: str) -> None:
    commands, submission = submit(answers)
    assert kinds([only(commands, OF_JOB)]) == [kind]
    assert submission.note.startswith(f"a {kind} (")
    assert reason in submission.note.partition("\n")[0]


def test_a_workload_and_a_namespace_that_are_named_are_used() -> None:
    commands, submission = submit(workload="job", namespace="team")
    assert lines(matching(commands, "--raw")) == [
        "kubectl --context lab --namespace team --request-timeout=30s get --raw /apis/batch/v1"
    ]
    assert kinds(matching(commands, DRY_RUN)) == ["Pod", "Service", "NetworkPolicy", "Job"]
    assert kinds(matching(commands, CREATE)) == ["NetworkPolicy", "Service", "Secret", "Job"]
    handle = {"workload": "job", "context": "lab", "namespace": "team", "logs": "ddpctl logs digits-otter"}
    assert submission.handle == handle
    assert_names(submission.note, "10 s", "600 s")  # how long a new pod may be delayed
    _, options = perform(KubernetesTarget(KubernetesOptions()).resolve(), cluster())
    assert (options.context, options.namespace) == ("lab", "ml")


def test_a_train_job_is_not_validated_and_not_created_before_its_runtime_exists() -> None:
    early = Output(returncode=1, stderr="denied the request: trainingRuntime must be created before the TrainJob\n")
    answers = iter((early, UID))
    commands, _ = submit({"--raw": OK, OF_JOB: lambda _: next(answers)}, workload="trainjob")
    assert [command.argv for command in matching(commands, "sleep")] == [("sleep", "1")]
    assert kinds(matching(commands, DRY_RUN)) == ["Pod", "TrainingRuntime", "NetworkPolicy"]
    assert kinds(matching(commands, CREATE)) == ["NetworkPolicy", "TrainingRuntime", "Secret", *["TrainJob"] * 2]


def test_the_secrets_of_a_job_and_of_its_store_go_through_stdin_alone() -> None:
    commands, _ = submit(job=SECRET, uid="4c1f5a1e2b3d", workload="pytorchjob")
    holder = only(commands, "store.secret: ")
    created = yaml.safe_load(holder.stdin or "")
    value = created["stringData"].pop("store.secret")
    assert re.fullmatch("[0-9a-f]{64}", value)
    labels = {
        "app.kubernetes.io/managed-by": "ddpctl",
        "app.kubernetes.io/name": "digits",
        "ddpctl.run": "digits-otter",
        "ddpctl.uid": "4c1f5a1e2b3d",
    }
    assert created == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "digits-otter", "namespace": "ml", "labels": labels},
        "type": "Opaque",
        "stringData": {"TOKEN": "c4nary"},
    }
    assert holder.secret
    for hidden in (value, "c4nary"):
        assert [command for command in commands if hidden in shell_line(command)] == []
        assert matching(commands, hidden) == [holder]
    reference = {"secretKeyRef": {"name": "digits-otter", "key": "TOKEN"}}
    assert {"name": "TOKEN", "valueFrom": reference} in container_of(commands)["env"]


@pytest.mark.parametrize(("profile", "mode"), [("restricted", 0o440), ("rdma", 0o400)])
def test_a_pod_mounts_the_secret_if_it_exists(profile: Any, mode: int) -> None:
    text = KubernetesTarget(KubernetesOptions(profile=profile)).render(plan_of())
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


def test_a_user_who_may_not_create_secrets_gets_a_run_that_signs_nothing() -> None:
    answers = {DRY_RUN: OK, OF_JOB: UID, CREATE: refused("Secret", NO_SECRETS)}
    commands, submission = submit(answers, workload="pytorchjob")
    assert [line.split()[7] for line in lines(matching(commands, " patch "))] == ["networkpolicy"]
    (warning,) = submission.table
    assert "k8s/rbac-secrets.yaml" in warning
    _, error = error_of(answers, job=SECRET, workload="pytorchjob")
    assert type(error) is ConfigError


def test_a_script_goes_along_with_the_files_it_needs() -> None:
    listed = Output(returncode=0, stdout="train.py\0lib/model.py\0lib/secrets.py\0README.md\0")
    files = {"lib/model.py": "x = 1\n", "train.py": "import lib.model\n"}
    read = Output(returncode=0, value={"files": files, "left_out": ["lib/secrets.py"]})
    job = replace(SIZED, command=("./train.py", "--lr", "0.1"))
    commands, submission = submit({"git ls-files": listed, "kubernetes.project": read}, job=job, workload="pytorchjob")
    assert lines(matching(commands, "git ")) == ["cd /project && git ls-files -z --cached --others --exclude-standard"]
    reader = only(commands, "kubernetes.project")
    assert reader.call.args == (Path("/project"), listed.stdout, ("*.py", "train.py"))
    config_map = yaml.safe_load(only(commands, "kind: ConfigMap").stdin or "")
    assert config_map["data"] == {"000-model.py": "x = 1\n", "001-train.py": "import lib.model\n"}
    assert [volume["configMap"] for volume in pod_of(commands)["volumes"] if "configMap" in volume] == [
        {
            "name": "digits-otter",
            "items": [{"key": "000-model.py", "path": "lib/model.py"}, {"key": "001-train.py", "path": "train.py"}],
        }
    ]
    _, sent, read_only, left_out, _ = submission.note.splitlines()
    assert "lib/model.py, train.py" in sent
    assert_names(read_only, "/workspace", "$DDP_RUN_DIR", "/tmp")
    assert "lib/secrets.py" in left_out


NOTHING = {"kubernetes.project": Output(returncode=0, value={"files": {}, "left_out": []})}


@pytest.mark.parametrize(
    ("answers", "given", "kind", "facts"),
    [
        (NOTHING, {"job": replace(JOB, command=("train.py",))}, NoInputError, ("train.py", "/project")),
        ({}, {"workload": "trainjob"}, ConfigError, ("TrainJob",)),
        ({"config view": Output(returncode=127, stderr="kubectl: not found")}, {}, UnavailableError, ("kubectl",)),
        ({"/apis/kubeflow.org": UNREACHABLE}, {}, UnavailableError, ("127.0.0.1:16999",)),
        ({DRY_RUN: refused("Pod", recorded("bad/pod-restricted"))}, {}, ConfigError, ("restricted:latest",)),
        ({DRY_RUN: refused("PyTorchJob", recorded("bad/rbac-create"))}, {}, ConfigError, ("k8s/rbac.yaml",)),
    ],
    ids=["no script", "no operator", "no kubectl", "no answer", "pod security", "rights"],
)
def test_a_refusal_comes_before_anything_is_created(
    answers: Mapping[str, Answer], given: dict[str, Any], kind: type[DdpctlError], facts: tuple[str, ...]
) -> None:
    commands, error = error_of(answers, **given)
    assert (type(error), matching(commands, CREATE)) == (kind, [])
    assert_names(error, *facts)


@pytest.mark.parametrize(
    ("label", "is_deleted"), [(UID, True), (OTHER_UID, False), (OK, False)], ids=["its own", "another's", "no label"]
)
def test_a_job_that_cannot_be_created_takes_back_what_it_needs_and_only_that(label: Output, is_deleted: bool) -> None:
    answers = {OF_JOB: recorded("bad/already-exists"), "labels.ddpctl": label}
    commands, error = error_of(answers, uid=UID.stdout)
    path = "'jsonpath={.metadata.labels.ddpctl\\.uid}'"
    assert lines(matching(commands, "labels.ddpctl")) == [
        f"{KUBECTL} get {kind} digits-otter --ignore-not-found -o {path}" for kind in ("networkpolicy", "secret")
    ]
    delete = f"{KUBECTL} delete networkpolicy,secret digits-otter --ignore-not-found --wait=false"
    assert lines(matching(commands, " delete ")) == [delete] * is_deleted
    assert type(error) is ConfigError
    assert '"running"' in str(error)


def head(job: JobSpec, **options: Any) -> list[str]:
    text = KubernetesTarget(KubernetesOptions(**options)).render(plan_of(job, "digits"))
    return [line for line in text.splitlines() if line.startswith("#")][1:]


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


def read(folder: Path, *globs: str, listed: str = "") -> tuple[dict[str, str], list[str]]:
    answer = reader.read(folder, listed, globs or DEFAULT_PROJECT)
    return answer["files"], answer["left_out"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name, text in {
        "train.py": "import lib.model\n",
        "lib/model.py": "x = 'é'\n",
        "conf/big.yaml": "a: 1\n",
        "README.md": "no",
        ".git/config.py": "no",
        "__pycache__/train.py": "no",
        "env/pyvenv.cfg": "no",
        "env/lib/site.py": "no",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_without_git_it_finds_the_code_and_no_environment_or_cache(project: Path) -> None:
    code = {"lib/model.py": "x = 'é'\n", "train.py": "import lib.model\n"}
    assert read(project) == (code, []), "without git: no environment and no cache"
    assert read(project, "lib/*.py", listed="train.py\0lib/model.py\0gone/lib.py\0") == (
        {"lib/model.py": "x = 'é'\n"}, [],
    )  # fmt: skip


SECRETS = (
    "AWS_Credentials.json", "conf/secrets.yaml", ".env", ".env.local", "prod.env", "tls.key", "tls.pem", "id_rsa",
    "service-account-1.json", "my_passwords.txt", "secrets/a.py", ".netrc", "hf_token.json", "kubeconfig-lab",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_a_file_with_a_name_like_a_secret_is_sent_only_by_its_own_name(project: Path, name: str) -> None:
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text("canary")
    files, left_out = read(project, "*")
    assert (name in files, left_out) == (False, [name])
    files, left_out = read(project, "*.py", name)
    assert (files[name], left_out) == ("canary", [])


def test_a_configuration_of_ddpctl_is_never_sent(project: Path) -> None:
    (project / "ddpctl.yaml").write_text("a: [broken")
    (project / "night.yml").write_text("job: {env: {WANDB_API_KEY: canary}}\ntarget: local\n")
    (project / "conf/job.yaml").write_text("job: {name: a}\nlr: 0.1\n")  # somebody else's
    files, left_out = read(project, "*.yaml", "*.yml", "ddpctl.yaml", "night.yml")
    assert (sorted(files), left_out) == (["conf/big.yaml", "conf/job.yaml"], [])
