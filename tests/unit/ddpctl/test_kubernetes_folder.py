"""What k8s/ holds and docs/kubernetes.md shows: every object is valid, every overlay and every command renders."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.in_process import ddpctl
from tests.unit.ddpctl.kubernetes_judges import CRDS, VERSIONS, faults, restricted

ROOT = Path(__file__).parents[3]
KUBECTL = shutil.which("kubectl")  # before a test's PATH is empty
# kustomize's, kind's, the Prometheus Operator's
OTHERS = {"Kustomization", "Component", "Cluster", "PodMonitor", "PrometheusRule"}


OVERLAYS = ("base", "overlays/gpu", "overlays/checkpoints", "overlays/team")
FILES = sorted(path for path in (ROOT / "k8s").rglob("*.yaml") if path.name != "kustomization.yaml")


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_every_object_in_the_folder_is_valid(path: Path) -> None:
    for thing in yaml.safe_load_all(path.read_text()):
        if thing["kind"] not in OTHERS:
            assert faults(thing) == []


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


def test_the_role_allows_what_the_verbs_do() -> None:
    """The resources and verbs of every kubectl command that the target may give."""
    role, binding = yaml.safe_load_all((ROOT / "k8s/rbac.yaml").read_text())
    allowed = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    jobs = ("pytorchjobs", "trainjobs", "jobs")
    wanted = {(job, verb) for job in jobs for verb in ("get", "list", "create", "patch", "delete")}
    wanted |= {("pods", verb) for verb in ("get", "list", "watch", "create", "delete")}
    kept = ("configmaps", "services", "networkpolicies", "trainingruntimes")
    wanted |= {(kind, verb) for kind in kept for verb in ("create", "patch", "delete")}
    wanted |= {("pods/log", "get"), ("pods/exec", "create"), ("events", "list")}
    assert wanted <= allowed
    assert role["kind"] == "Role"  # nothing of the whole cluster
    assert "secrets" not in {resource for resource, _ in allowed}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


def test_secrets_are_a_role_of_their_own() -> None:
    role, binding = yaml.safe_load_all((ROOT / "k8s/rbac-secrets.yaml").read_text())
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "create", "patch", "delete"]}
    ]
    assert (role["kind"], binding["roleRef"]["name"]) == ("Role", role["metadata"]["name"])


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
