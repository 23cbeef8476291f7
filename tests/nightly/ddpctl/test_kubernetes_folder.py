"""Further objects of k8s/, and their order."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.nightly.ddpctl.test_kubernetes_manifests import KUBECTL
from tests.unit.ddpctl.test_kubernetes_manifests import ROOT


@pytest.mark.skipif(KUBECTL is None, reason="needs kubectl, for kubectl kustomize")
def test_the_runtime_of_a_train_job_comes_first_with_the_order_that_the_page_names(tmp_path: Path) -> None:
    (advice,) = re.findall(r"`(sortOptions: \{.*?\})`", (ROOT / "k8s/README.md").read_text())
    shutil.copy(ROOT / "k8s/trainjob.yaml", tmp_path)
    (tmp_path / "kustomization.yaml").write_text(f"resources: [trainjob.yaml]\n{advice}\n")
    done = subprocess.run([str(KUBECTL), "kustomize", tmp_path], capture_output=True, text=True, timeout=60, check=True)
    kinds = [thing["kind"] for thing in yaml.safe_load_all(done.stdout)]
    assert kinds.index("TrainingRuntime") < kinds.index("TrainJob")


def test_the_policy_of_the_namespace_is_for_our_pods_alone() -> None:
    policy = yaml.safe_load((ROOT / "k8s/networkpolicy.yaml").read_text())
    pod = yaml.safe_load((ROOT / "k8s/indexed-job.yaml").read_text().split("\n---\n")[2])["spec"]["template"]
    wanted = policy["spec"]["podSelector"]["matchLabels"]
    assert wanted
    assert wanted.items() <= pod["metadata"]["labels"].items()
    assert policy["spec"]["policyTypes"] == ["Ingress"]
