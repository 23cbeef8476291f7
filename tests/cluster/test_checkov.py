"""checkov on the pod template as a Pod, with its NetworkPolicy: it finds what is meant, and a planted fault."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.ddpctl.kubernetes_lab import JOB, draft_of

from ddpctl.targets.kubernetes import manifests, target
from ddpctl.targets.kubernetes.manifests import WORKLOADS
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.pod import dump

CHECKOV = shutil.which("checkov")
pytestmark = pytest.mark.skipif(
    CHECKOV is None, reason="needs checkov (pipx install checkov: 61 packages, its own place)"
)
PATH = os.environ["PATH"]
# No probes: a name that DNS gives only to a pod that is ready would make the rendezvous wait for the training.
MEANT = {"CKV_K8S_8", "CKV_K8S_9"}
DIGEST = "registry.example.com/team/train@sha256:" + "0" * 64


def found(tmp_path: Path, *, plant: Callable[[dict[str, Any]], None] = lambda _: None, word: str = "job") -> set[str]:
    draft = draft_of(
        replace(JOB, cpus=4, memory="16Gi", image=DIGEST), KubernetesOptions(namespace="ml", pull="Always")
    )
    pod = target.bare_pod(draft, WORKLOADS[word])
    plant(pod)
    (tmp_path / "pod.yaml").write_text(dump([pod, manifests.network_policy(draft)]))
    argv = [str(CHECKOV), "-f", "pod.yaml", "--framework", "kubernetes", "--output", "json", "--skip-download"]
    done = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, text=True, timeout=240, env={"PATH": PATH, "HOME": str(tmp_path)}
    )
    answer = json.loads(done.stdout)
    assert answer["summary"]["passed"] > 60
    return {check["check_id"] for check in answer["results"]["failed_checks"]}


@pytest.mark.parametrize("word", WORKLOADS)
def test_it_finds_what_is_meant_and_nothing_else(tmp_path: Path, word: str) -> None:
    assert found(tmp_path, word=word) == MEANT


def test_it_finds_a_planted_fault(tmp_path: Path) -> None:
    def root(pod: dict[str, Any]) -> None:
        pod["spec"]["containers"][0]["securityContext"] = {"privileged": True}
        del pod["spec"]["containers"][0]["resources"]["limits"]

    assert {"CKV_K8S_16", "CKV_K8S_11", "CKV_K8S_13", "CKV_K8S_20", "CKV_K8S_22"} <= found(tmp_path, plant=root) - MEANT
