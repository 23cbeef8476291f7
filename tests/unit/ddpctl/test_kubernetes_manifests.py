"""The manifests of all workloads and many options are valid, and each check of validity finds a planted fault."""

import copy
import itertools
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.in_process import ddpctl
from tests.unit.ddpctl.kubernetes_judges import VERSIONS, faults, restricted
from tests.unit.ddpctl.kubernetes_lab import DATA, JOB, draft_of, expand, plan_of

from ddpctl.job.spec import JobSpec
from ddpctl.targets.kubernetes import manifests, target
from ddpctl.targets.kubernetes.manifests import WORKLOADS
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.pod import Draft, dump, literal
from ddpctl.targets.kubernetes.target import KubernetesTarget

JOBS = {
    "plain": JOB,
    "one": JobSpec(name="one"),
    "elastic": replace(JOB, nodes="1:4"),
    "cpu": replace(JOB, device="cpu", cpus=4, memory="16Gi", shm="2Gi"),
    "sized": replace(JOB, cpus=8, memory="64Gi", port=4000, time_limit="12h", grace=120.5, max_restarts=0),
    "mounted": replace(
        JOB, mounts=("pvc=data:/data:ro", "pvc=ckpt:/runs", "secret=s3:/home/.aws", "configmap=c:/etc/c")
    ),
    "secret": replace(
        JOB, secrets=("WANDB_API_KEY",), env={"A": "$(B) $$ x", "EMPTY": ""}, command=("-m", "pkg.train")
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "queued": {"queue": "team", "keep": "7d", "labels": {"team": "vision", "x.y/z": ""}},
    "gang": {"gang": True, "queue": "team", "pod": {"spec": {"schedulerName": "scheduler-plugins-scheduler"}}},
    "placed": {
        "pod": {"spec": {"nodeSelector": {"gpu.example.com/kind": "h200"}, "priorityClassName": "high"}},
        "tolerations": ("dedicated=gpu:NoSchedule", "spot"),
        "lost_node": 0,
    },
    "amd": {"gpu_resource": "amd.com/gpu", "pod": {"spec": {"imagePullSecrets": [{"name": "registry"}]}}},
    "mig": {"gpu_resource": "nvidia.com/mig-1g.10gb", "network_policy": False},
    "rdma": {"profile": "rdma"},
    "master": {"master": True},
    "exit-code": {"restart": "ExitCode", "failures": 1},
    "on-failure": {"restart": "OnFailure"},
    "kept": {"keep": None, "scratch": None},
    "never": {"restart": "Never", "clean_pods": "All"},
}


def cases(*, all_pairs: bool) -> list[Any]:
    """A job and options for each workload; if not ``all_pairs``, one of the two is the default."""
    params = []
    for word, (job_name, job), (name, given) in itertools.product(WORKLOADS, JOBS.items(), OPTIONS.items()):
        options = KubernetesOptions(workload=word, **given)
        if (all_pairs or job_name == "plain" or name == "default") and not list(options.problems(job)):
            params.append(pytest.param(job, options, id=f"{word}-{job_name}-{name}"))
    return params


CASES = cases(all_pairs=False)


def objects(job: JobSpec, options: KubernetesOptions) -> list[dict[str, Any]]:
    """All that a launch makes, the bare pod of its dry run too; as it is read back from the text."""
    draft = replace(draft_of(job, options), project={"000-train.py": "train.py"})
    workload = WORKLOADS[options.workload]
    things = [
        *workload.before(draft),
        workload.job(draft),
        target.bare_pod(draft, workload),
        manifests.config_map(draft, {"train.py": "print('hé')\n\tx = '''on'''\n"}),
        manifests.secret(draft, {"WANDB_API_KEY": "s3cr:et"}),
        manifests.network_policy(draft),
    ]
    text = dump(things)
    read = list(yaml.load_all(text, Loader=yaml.CSafeLoader))
    assert read == things
    return read


def check_schemas(job: JobSpec, options: KubernetesOptions) -> None:
    for thing in objects(job, options):
        assert faults(thing, ("1.36",)) == [], thing["kind"]


def check_pod_security(job: JobSpec, options: KubernetesOptions) -> None:
    violations = restricted(target.bare_pod(draft_of(job, options), WORKLOADS[options.workload]))
    if options.profile == "rdma":
        container = WORKLOADS[options.workload].container
        assert violations == [
            f"{container}: unrestricted capabilities",
            f"{container}: runAsNonRoot != true",
            f"{container}: runAsUser=0",
        ]
    else:
        assert violations == []


@pytest.mark.parametrize(("job", "options"), CASES)
def test_the_schemas_accept_every_object_and_pod_security_restricted_every_pod(
    job: JobSpec, options: KubernetesOptions
) -> None:
    check_schemas(job, options)
    check_pod_security(job, options)


@pytest.mark.parametrize("word", WORKLOADS)
def test_every_version_of_kubernetes_accepts_every_object(word: str) -> None:
    for thing in objects(JOBS["mounted"], KubernetesOptions(workload=word, **OPTIONS["placed"])):  # type: ignore[arg-type]
        assert faults(thing) == [], thing["kind"]


def test_the_check_of_pod_security_finds_what_the_cluster_found_and_a_path_of_the_machine() -> None:
    pods = {name: yaml.safe_load((DATA / f"psa/psa-{name}-pod.yaml").read_text()) for name in ("ok", "violates")}
    assert restricted(pods["ok"]) == []
    assert restricted(pods["violates"]) == [
        "pytorch: allowPrivilegeEscalation != false",
        "pytorch: unrestricted capabilities",
        "pytorch: runAsNonRoot != true",
        "pytorch: seccompProfile",
    ]
    draft = draft_of(replace(JOB, mounts=("/mnt/data:/data",)))
    assert restricted(target.bare_pod(draft, WORKLOADS["pytorchjob"])) == ["volume mount-0 is a hostPath"]


PLANTED = {
    "a field that is misspelt": lambda pod: pod["spec"].update(terminationGracePeriod=3),
    "a field of a container that is misspelt": lambda pod: pod["spec"]["containers"][0].update(rezources={}),
    "a number for a variable": lambda pod: pod["spec"]["containers"][0]["env"][0].update(value=2),
    "a list for labels": lambda pod: pod["metadata"].update(labels=["a"]),
}


@pytest.mark.parametrize("word", WORKLOADS)
def test_an_evicted_pod_has_more_time_than_its_ranks_need_to_save(word: str) -> None:
    spec = target.bare_pod(draft_of(JOBS["sized"]), WORKLOADS[word])["spec"]
    assert spec["terminationGracePeriodSeconds"] == 121 + 30, "the job's grace, and a margin"


@pytest.mark.parametrize("word", WORKLOADS)
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(word: str, fault: str) -> None:
    workload, draft = WORKLOADS[word], draft_of()
    good = target.bare_pod(draft, workload)
    bad = copy.deepcopy(good)
    bad["spec"]["containers"][0]["env"].insert(0, {"name": "A", "value": "1"})
    assert faults(bad) == []
    PLANTED[fault](bad)
    assert len(faults(bad)) >= len(VERSIONS)


@pytest.mark.parametrize("word", WORKLOADS)
def test_a_pod_that_crashed_or_failed_ends_its_job_and_a_lost_one_does_not(word: str) -> None:
    text = KubernetesTarget(KubernetesOptions(workload=word)).render(plan_of())
    if word == "pytorchjob":
        assert re.findall(r"restartPolicy: (\S+)", text) == ["ExitCode"]
        return
    (rule,) = re.findall(r"operator: NotIn\n *values:\n((?: *- \d+\n)+)", text)
    assert {int(code) for code in re.findall(r"\d+", rule)} == {129, 134, 137, 138, 140, 142, 143, 144}


def pod_of(job: JobSpec, **options: Any) -> dict[str, Any]:
    spec: dict[str, Any] = WORKLOADS["pytorchjob"].pod(draft_of(job, KubernetesOptions(**options)))["spec"]
    return spec


@pytest.mark.parametrize(
    ("scratch", "reserved"), [("50Gi", "1Gi"), ("512Mi", "512Mi"), (None, None)], ids=["much", "little", "no limit"]
)
def test_a_pods_local_storage_has_limits(scratch: str | None, reserved: str | None) -> None:
    spec = pod_of(JOB, scratch=scratch)
    resources = spec["containers"][0]["resources"]
    assert [resources[bound].get("ephemeral-storage") for bound in ("requests", "limits")] == [reserved, scratch]
    volumes = {volume["name"]: volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume}
    disk = {"sizeLimit": scratch} if scratch else {}
    assert volumes == {"shm": {"medium": "Memory", "sizeLimit": "8Gi"}, "tmp": disk, "runs": disk}


@pytest.mark.parametrize(("keep", "ttl"), [({}, 604800), ({"keep": "1h"}, 3600), ({"keep": None}, None)])
def test_an_ended_job_is_deleted_after_the_time_of_keep(keep: dict[str, Any], ttl: int | None) -> None:
    for word in WORKLOADS:
        things = yaml.safe_load_all(KubernetesTarget(KubernetesOptions(workload=word, **keep)).render(plan_of()))
        times = re.findall(r"ttlSecondsAfterFinished: (\S+)", dump(list(things)))
        assert times == ([str(ttl)] if ttl else []), word


def test_a_pod_knows_whether_it_is_replaced_and_only_from_a_launch_its_image() -> None:
    def variables(job: JobSpec, uid: str = "", **options: Any) -> set[str]:
        draft = replace(draft_of(job, KubernetesOptions(**options)), plan=plan_of(job, uid=uid))
        return {entry["name"] for entry in WORKLOADS["pytorchjob"].pod(draft)["spec"]["containers"][0]["env"]}

    own = {"DDP_NODE_REPLACED", "DDP_IMAGE"}
    assert own & variables(JOB, "12ab") == own
    assert own & variables(JOB) == {"DDP_NODE_REPLACED"}
    assert own & (variables(replace(JOB, nodes="1")) | variables(JOB, restart="Never")) == set()


@pytest.mark.parametrize("nodes", ["4", "1:4"])
@pytest.mark.parametrize("word", WORKLOADS)
def test_ddpctl_gives_a_pod_the_number_of_nodes_once(word: str, nodes: str) -> None:
    pod = WORKLOADS[word].pod(draft_of(replace(JOB, nodes=nodes), KubernetesOptions(workload=word)))  # type: ignore[arg-type]
    (container,) = pod["spec"]["containers"]
    given = [entry["value"] for entry in container["env"] if entry["name"] == "PET_NNODES"]
    given += container["args"][1:2] if container["args"][0] == "--nnodes" else []
    from_operator = word == "trainjob" and nodes == "4"
    assert given == ([] if from_operator else [nodes])


@pytest.mark.parametrize("word", WORKLOADS)
def test_all_that_a_launch_makes_has_its_uid_and_is_selected_by_its_name(word: str) -> None:
    job = replace(JOB, secrets=("TOKEN",))
    options = KubernetesOptions(workload=word)  # type: ignore[arg-type]
    draft = Draft(plan=plan_of(job, uid="4c1f5a1e2b3d"), options=options, project={})
    before = (manifests.network_policy(draft), manifests.config_map(draft, {}), manifests.secret(draft, {"TOKEN": "x"}))
    things = (*before, *WORKLOADS[word].before(draft), WORKLOADS[word].job(draft))
    labels = [thing["metadata"]["labels"] for thing in (*things, WORKLOADS[word].pod(draft))]
    assert {(label["ddpctl.run"], label["ddpctl.uid"]) for label in labels} == {("digits-otter", "4c1f5a1e2b3d")}
    text = dump(things)
    selectors = re.findall(r"(?:matchLabels|selector):\n +(\S+): \S+\n +(\S+)", text)
    assert selectors
    assert {key for pair in selectors for key in pair if key.startswith("ddpctl.")} == {"ddpctl.run"}


@pytest.mark.parametrize(
    "text", ["$(HOSTNAME)", "$$(HOSTNAME)", "$$", "$", "a$b$$c", "$$$", "$$$(X)", "price: 5$", "${HOME}", "$("]
)
def test_an_argument_that_kubernetes_would_expand_arrives_unchanged(text: str) -> None:
    assert expand(literal(text)) == text


@pytest.mark.parametrize(
    "text", ["1e3", "1:30", "on", "Yes", "0x1F", "~", "null", "-1", "1_000", ".5", "=", "2026-01-01", "y"]
)
def test_text_that_yaml_may_read_as_another_type_is_quoted(text: str) -> None:
    assert dump([{"a": text}]) == f"a: '{text}'\n"
    assert yaml.safe_load(dump([{text: text}])) == {text: text}


ROOT = Path(__file__).parents[3]
# kustomize's, kind's, the Prometheus Operator's
OTHERS = {"Kustomization", "Component", "Cluster", "PodMonitor", "PrometheusRule"}
FILES = sorted(path for path in (ROOT / "k8s").rglob("*.yaml") if path.name != "kustomization.yaml")


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_every_object_in_the_folder_is_valid(path: Path) -> None:
    for thing in yaml.safe_load_all(path.read_text()):
        if thing["kind"] not in OTHERS:
            assert faults(thing) == []


def test_the_role_allows_what_the_verbs_do() -> None:
    """The resources and verbs of every kubectl command that the target may give; those of Secrets are a role apart."""
    (role, binding), (of_secrets, its_binding) = (
        yaml.safe_load_all((ROOT / f"k8s/{name}.yaml").read_text()) for name in ("rbac", "rbac-secrets")
    )
    allowed = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    jobs = ("pytorchjobs", "trainjobs", "jobs")
    wanted = {(job, verb) for job in jobs for verb in ("get", "list", "create", "patch", "delete")}
    wanted |= {("pods", verb) for verb in ("get", "list", "watch", "create", "delete")}
    kept = ("configmaps", "services", "networkpolicies", "trainingruntimes")
    wanted |= {(kind, verb) for kind in kept for verb in ("create", "patch", "delete")}
    wanted |= {("pods/log", "get"), ("pods/exec", "create"), ("events", "list")}
    assert wanted <= allowed
    assert "secrets" not in {resource for resource, _ in allowed}
    assert of_secrets["rules"] == [
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "create", "patch", "delete"]}
    ]
    for each, bound in ((role, binding), (of_secrets, its_binding)):
        assert (each["kind"], bound["roleRef"]["name"]) == ("Role", each["metadata"]["name"]), "of one namespace"


PAGE = (ROOT / "docs/kubernetes.md").read_text()
SHOWN = re.findall(r"^\$ ddpctl (launch|render) (.*?)(?:\s+#.*)?$", PAGE, re.M)


@pytest.mark.parametrize("line", [rest for _, rest in SHOWN])
def test_a_command_on_the_page_renders(line: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "train.py").write_text("")
    options = [option for option in shlex.split(line) if option != "--dry-run"]
    done = ddpctl("render", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {thing["kind"] for thing in yaml.safe_load_all(done.stdout)} & {"PyTorchJob", "TrainJob", "Job"}


def test_the_page_shows_the_errors_that_ddpctl_prints(tmp_path: Path) -> None:
    part = PAGE.partition("## If it does not start")[2]
    file, errors = re.findall(r"^```(?:yaml)?\n(.*?)^```", part, re.M | re.S)[:2]
    (tmp_path / "ddpctl.yaml").write_text(file)
    done = ddpctl("render", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (78, errors)


def test_the_yaml_on_the_page_is_valid() -> None:
    assert len(SHOWN) == 4
    for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S):
        assert yaml.safe_load(block)
