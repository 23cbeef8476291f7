"""What a cluster would accept silently, or refuse late, is an error at its place in the file, before any command runs.

The option ``pod``: each patch gives what kubectl gives, and what ddprun depends on is refused.

In refusals.txt: the file, "----", its errors, "====". An error is its line and column, and what its message names.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.messages import refused
from tests.unit.ddpctl.kubernetes_judges import faults
from tests.unit.ddpctl.kubernetes_lab import DATA, JOB, draft_of
from tests.unit.ddpctl.loading import check_errors, read_cases

from ddpctl import targets
from ddpctl.errors import ConfigError, FileError, UsageError
from ddpctl.job import config
from ddpctl.job.launch_plan import Request
from ddpctl.targets.kubernetes import target
from ddpctl.targets.kubernetes.manifests import WORKLOADS
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.pod import dump, reader
from ddpctl.targets.kubernetes.pod_patch import merge


def load(tmp_path: Path, text: str, **rest: Any) -> Request:
    path = tmp_path / "ddpctl.yaml"
    path.write_text(text)
    return config.load(file=path, kinds=targets.kinds(), **rest)


@pytest.mark.parametrize(("text", "errors"), read_cases(DATA / "refusals.txt"))
def test_a_bad_file_is_refused_at_the_place_of_each_error(tmp_path: Path, text: str, errors: list[str]) -> None:
    with pytest.raises(FileError) as raised:
        load(tmp_path, text)
    check_errors(str(raised.value).replace(f"{tmp_path}/", ""), errors)


KIND = {"workload": "job"}
GOOD = "job: {name: digits, nodes: 2}\ntarget: lab\ntargets:\n  lab: {kind: kubernetes}\n"


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        ({"flags": {"port": 9500}}, ["--port: 9500", "metrics_port"]),
        ({"flags": {"workload": "jbo"}}, ["--kind: 'jbo'", "auto, pytorchjob, trainjob, job"]),
        ({"flags": KIND, "target": "local"}, ["--kind", "local", "kubernetes"]),
    ],
    ids=["port", "kind", "kind of another target"],
)
def test_a_bad_flag_is_refused_by_its_name(tmp_path: Path, flags: dict[str, object], facts: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        load(tmp_path, GOOD, **flags)
    assert str(error.value).startswith(facts[0])
    assert all(fact in str(error.value) for fact in facts)


def test_only_the_chosen_target_is_checked_against_the_job(tmp_path: Path) -> None:
    text = GOOD.replace("target: lab", "target: local").replace("lab: {", "lab: {master: true, ").replace("2}", "1:2}")
    assert load(tmp_path, text).kind == "local"
    with pytest.raises(FileError) as error:
        load(tmp_path, text, target="lab")
    check_errors(str(error.value).replace(f"{tmp_path}/", ""), ["4:17 | master | 1:2"])


KUBECTL = shutil.which("kubectl")  # before a test's PATH is empty
POD = yaml.safe_load("""\
apiVersion: v1
kind: Pod
metadata: {name: night, labels: {team: vision}, annotations: {a: one}}
spec:
  nodeSelector: {zone: one}
  tolerations: [{key: gpu, operator: Exists}]
  imagePullSecrets: [{name: registry}]
  topologySpreadConstraints:
  - {maxSkew: 1, topologyKey: host, whenUnsatisfiable: ScheduleAnyway}
  securityContext: {runAsUser: 10001, fsGroup: 10001}
  containers:
  - name: main
    image: i
    args: [a, b]
    env: [{name: A, value: one}, {name: B, value: two}, {name: C, value: three}]
    ports: [{name: metrics, containerPort: 9500}, {name: rendezvous, containerPort: 23456}]
    resources: {limits: {cpu: '4'}, requests: {cpu: '4'}}
    volumeMounts: [{name: tmp, mountPath: /tmp}, {name: shm, mountPath: /dev/shm}]
  volumes: [{name: tmp, emptyDir: {sizeLimit: 1Gi}}, {name: shm, emptyDir: {medium: Memory}}]
""")
PATCHES = [
    "metadata: {annotations: {a: null, b: two}}",
    "spec: {nodeSelector: {kind: h200}}",
    "spec: {nodeSelector: {$patch: replace, kind: h200}}",
    "spec: {topologySpreadConstraints: [{topologyKey: zone, maxSkew: 1, whenUnsatisfiable: DoNotSchedule}]}",
    "spec: {securityContext: {runAsUser: 0, fsGroup: null}}",
    "spec: {containers: [{name: main, envFrom: [{secretRef: {name: s}}]}, {name: side, image: s}]}",
    "spec: {containers: [{name: main, env: [{name: C, value: new}, {name: D, value: four}, {name: A, value: x}]}]}",
    "spec: {containers: [{name: main, resources: {requests: {cpu: 500m}, limits: {cpu: null, memory: 8Gi}}}]}",
    "spec: {volumes: [{name: tmp, $patch: delete}]}",
]


@pytest.mark.skipif(KUBECTL is None, reason="needs kubectl, for kubectl patch --local")
@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_gives_what_kubectl_gives(patch: str, tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text(dump((POD,)))
    (tmp_path / "patch.yaml").write_text(patch)
    arguments = ("patch", "--local", "--type=strategic", "-f", "pod.yaml", "--patch-file=patch.yaml", "-o", "yaml")
    env = {"PATH": os.defpath, "HOME": str(tmp_path), "KUBECONFIG": os.devnull}
    done = subprocess.run([str(KUBECTL), *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    expected = yaml.safe_load(done.stdout)
    for part in (expected, expected["metadata"]):  # of the Go type
        for name in ("status", "creationTimestamp"):
            part.pop(name, None)
    assert without_defaults(merge(POD, yaml.safe_load(patch))) == without_defaults(expected)


def without_defaults(value: Any) -> Any:
    """The value without what kubectl adds to an object of a Go type: empty resources, and metadata of a claim."""
    if isinstance(value, list):
        return [without_defaults(item) for item in value]
    if not isinstance(value, dict):
        return value
    parts = {key: without_defaults(item) for key, item in value.items() if item is not None}
    return {
        key: item for key, item in parts.items() if item != {} or key not in ("resources", "metadata", "annotations")
    }


def pod_of(word: str, patch: str) -> dict[str, Any]:
    options = KubernetesOptions(workload=word, pod=yaml.safe_load(patch))  # type: ignore[arg-type]
    return target.bare_pod(draft_of(JOB, options), WORKLOADS[word])


@pytest.mark.parametrize("word", WORKLOADS)
def test_a_patch_of_main_is_one_of_the_container_of_each_workload(word: str) -> None:
    pod = pod_of(word, "spec: {containers: [{name: main, tty: true}, {name: side, image: s}], hostNetwork: true}")
    containers = {container["name"]: container for container in pod["spec"]["containers"]}
    assert {*containers} == {WORKLOADS[word].container, "side"}
    main = containers[WORKLOADS[word].container]
    assert (main["tty"], main["command"]) == (True, ["ddprun"])
    assert pod["spec"]["hostNetwork"] is True
    assert faults(pod) == []


@pytest.mark.parametrize(
    ("patch", "names"),
    [
        ("spec: {containers: [{name: main, args: [a]}]}", ["args"]),
        ("spec: {containers: [{name: main, env: [{name: PET_NNODES, value: '3'}]}]}", ["PET_NNODES"]),
        ("spec: {containers: [{name: main, ports: [{$patch: replace}]}]}", ["pytorchjob-port", "metrics"]),
        ("spec: {containers: [{name: main, $patch: delete}]}", ["command", "PET_NNODES"]),
        ("spec: {restartPolicy: Always}", ["restartPolicy"]),
        ("metadata: {labels: {ddpctl.run: other}}", ["ddpctl.run"]),
        ("kind: Pod", ["kind", "metadata", "spec"]),
    ],
)
def test_a_patch_that_contradicts_the_contract_is_refused(patch: str, names: list[str]) -> None:
    with refused(ConfigError, *names, code=78):
        pod_of("pytorchjob", patch)


ADDITIONS = """\
PyTorchJob:
  metadata: {annotations: {team.example/owner: vision}}
  spec: {runPolicy: {activeDeadlineSeconds: 60, schedulingPolicy: {priorityClass: high, minResources: {cpu: '8'}}}}
TrainJob: {spec: {suspend: true, activeDeadlineSeconds: 60}}
TrainingRuntime: {spec: {podGroupPolicy: {volcano: {}}}}
Job: {spec: {podReplacementPolicy: Failed}}
"""


@pytest.mark.parametrize("word", WORKLOADS)
def test_a_patch_adds_fields_to_the_manifest_of_its_kind(word: str) -> None:
    patches = yaml.safe_load(ADDITIONS)
    plain, patched = (
        {thing["kind"]: thing for thing in (*WORKLOADS[word].before(draft), WORKLOADS[word].job(draft))}
        for draft in (draft_of(JOB, KubernetesOptions(workload=word, manifests=each)) for each in ({}, patches))  # type: ignore[arg-type]
    )
    assert any(kind in patches for kind in patched)
    for kind, thing in patched.items():
        assert thing == merge(plain[kind], patches.get(kind, {}))
        assert (thing != plain[kind]) == (kind in patches)
        assert faults(thing) == []


@pytest.mark.parametrize(
    ("word", "patches", "names"),
    [
        ("pytorchjob", "PyTorchJob: {spec: {elasticPolicy: {minReplicas: 1}}}", ["PyTorchJob", "elasticPolicy"]),
        ("pytorchjob", "PyTorchJob: {spec: {pytorchReplicaSpecs: {Master: {replicas: 1}}}}", ["pytorchReplicaSpecs"]),
        ("trainjob", "TrainJob: {spec: {trainer: {command: [python]}}}", ["TrainJob", "trainer"]),
        ("job", "Job: {spec: {template: {spec: {hostNetwork: true}}}}", ["Job", "template"]),
    ],
)
def test_a_patch_of_a_manifest_may_only_add(word: str, patches: str, names: list[str]) -> None:
    draft = draft_of(JOB, KubernetesOptions(workload=word, manifests=yaml.safe_load(patches)))  # type: ignore[arg-type]
    with refused(ConfigError, *names, code=78):
        _ = (WORKLOADS[word].before(draft), WORKLOADS[word].job(draft))


def test_the_pod_that_reads_a_claim_is_placed_as_the_pods_of_the_run() -> None:
    spec = {"nodeSelector": {"kind": "h200"}, "containers": [{"name": "side", "image": "s"}]}
    pod = reader("night", "", JOB, KubernetesOptions(pod={"spec": spec}), "/runs/night/checkpoints")
    assert pod["spec"]["nodeSelector"] == {"kind": "h200"}
    assert [container["name"] for container in pod["spec"]["containers"]] == ["reader"]
