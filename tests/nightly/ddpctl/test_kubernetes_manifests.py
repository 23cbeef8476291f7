"""All pairs of the jobs and options of tests/unit/ddpctl/test_kubernetes_manifests.py give valid manifests."""

import shutil
import subprocess

import pytest
import yaml
from tests.unit.ddpctl.kubernetes_judges import CRDS, VERSIONS, faults, restricted
from tests.unit.ddpctl.kubernetes_lab import draft_of
from tests.unit.ddpctl.test_kubernetes_manifests import ROOT, cases, check_pod_security, check_schemas

from ddpctl.job.spec import JobSpec
from ddpctl.targets.kubernetes.manifests import WORKLOADS
from ddpctl.targets.kubernetes.options import KubernetesOptions

KUBECTL = shutil.which("kubectl")  # before a test's PATH is empty
OVERLAYS = ("base", "overlays/gpu", "overlays/checkpoints", "overlays/team")

CASES = cases(all_pairs=True)


@pytest.mark.parametrize(("job", "options"), CASES)
def test_the_schemas_accept_every_object(job: JobSpec, options: KubernetesOptions) -> None:
    assert len(CASES) > 150
    check_schemas(job, options)


@pytest.mark.parametrize(("job", "options"), CASES)
def test_pod_security_restricted_admits_every_pod(job: JobSpec, options: KubernetesOptions) -> None:
    check_pod_security(job, options)


def test_a_planted_fault_in_a_job_is_found() -> None:
    draft = draft_of()
    job = WORKLOADS["pytorchjob"].job(draft)
    job["spec"]["nprocPerNode"] = 2
    assert [line.partition(": ")[2] for line in faults(job)] == ["spec.nprocPerNode: 2 is not of type 'string'"] * 3
    job["spec"]["nprocPerNode"] = "2"
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["rezources"] = {}
    assert ["rezources" in line for line in faults(job)] == [True, True, True]
    train = WORKLOADS["trainjob"].job(draft)
    train["spec"]["trainer"]["numProcPerNode"] = "auto"
    assert len(faults(train)) == 2
    (runtime,) = WORKLOADS["trainjob"].before(draft)
    runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimits"] = 1
    assert len(faults(runtime)) == 2


@pytest.mark.skipif(KUBECTL is None, reason="needs kubectl, for kubectl kustomize")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_is_a_job_that_a_cluster_takes(overlay: str) -> None:
    argv = [str(KUBECTL), "kustomize", str(ROOT / "k8s" / overlay)]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    )
    assert done.returncode == 0, done.stderr
    things = {thing["kind"]: thing for thing in yaml.safe_load_all(done.stdout)}
    assert all(faults(thing, VERSIONS[-1:]) == [] for thing in things.values())
    template = things["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    assert restricted(template) == []
    container = template["spec"]["containers"][0]
    device = next(entry["value"] for entry in container["env"] if entry["name"] == "DDP_DEVICE")
    gpus = overlay in ("overlays/gpu", "overlays/team")
    assert (device, container["resources"]["limits"].get("nvidia.com/gpu")) == (
        ("cuda", "2") if gpus else ("cpu", None)
    )
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert ("persistentVolumeClaim" in volumes["runs"]) == (overlay in ("overlays/checkpoints", "overlays/team"))
    assert "PersistentVolumeClaim" not in things  # kubectl delete -k would delete the checkpoints
    size = (container["resources"]["limits"], container["resources"]["requests"], volumes["shm"]["emptyDir"])
    cpu, memory, shm = ("16", "64Gi", "8Gi") if gpus else ("2", "4Gi", "1Gi")
    assert [(part["cpu"], part["memory"]) for part in size[:2]] == [(cpu, memory)] * 2
    assert size[2]["sizeLimit"] == shm
    if overlay == "overlays/team":
        assert container["image"].startswith("registry.example.com/ml/ddpctl:")
        assert {thing["metadata"]["namespace"] for thing in things.values()} == {"ml"}
        assert {thing["metadata"]["labels"]["team"] for thing in (*things.values(), template)} == {"vision"}
        assert things["PyTorchJob"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "vision"
    assert "PyTorchJob" in CRDS
