"""A real cluster for the suite: a namespace of its own, a folder that outlives pods, and what it is asked.

It is the cluster that KUBECONFIG names; the image is DDPCTL_TEST_IMAGE. It installs nothing beyond the namespace.
"""

import json
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.driver import ddpctl

HOW = (
    "needs a Kubernetes cluster (KUBECONFIG) and an image that it can pull (DDPCTL_TEST_IMAGE). With kind: "
    "mkdir -m 1777 /tmp/ddpctl-kind; kind create cluster --config k8s/kind.yaml; "
    "kind load docker-image $DDPCTL_TEST_IMAGE. Kubeflow's operator is used where it is installed"
)
DEFAULT_VOLUME = "/mnt/ddpctl-test"  # a path of the machines; DDPCTL_TEST_CLASS=NAME: a claim of that StorageClass
PATIENCE_S = 300.0


def why_not() -> str | None:
    """Why there is no cluster to test on; None: there is one."""
    kubectl = shutil.which("kubectl")
    if not os.environ.get("KUBECONFIG") or not os.environ.get("DDPCTL_TEST_IMAGE") or kubectl is None:
        return HOW
    done = subprocess.run([kubectl, "get", "--raw", "/version"], capture_output=True, text=True, timeout=60)
    return None if done.returncode == 0 else f"{HOW} (it does not answer: {done.stderr.strip().splitlines()[-1]})"


def wait_until(true: Callable[[], Any], event: str, timeout_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (answer := true()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {event}"
        time.sleep(1)
    return answer


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The namespace, through kubectl."""

    kubectl: str
    namespace: str
    image: str
    volume: str
    storage_class: str | None = None

    def run(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        argv = [self.kubectl, "--namespace", self.namespace, *arguments]
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 or not check, f"{' '.join(argv)}: {done.stderr}"
        return done.stdout

    def get(self, resource: str, *rest: str) -> list[dict[str, Any]]:
        answer = json.loads(self.run("get", resource, *rest, "--output", "json"))
        objects: list[dict[str, Any]] = answer.get("items", [answer])
        return objects

    def pods(self, run: str) -> dict[str, str]:
        """uid by the node's number, of pods that run."""
        listed = {}
        for pod in self.get("pods", "--selector", f"ddpctl.run={run}"):
            labels, status = pod["metadata"]["labels"], pod["status"]
            index = labels.get("training.kubeflow.org/replica-index") or labels.get(
                "batch.kubernetes.io/job-completion-index", "0"
            )
            if status.get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]:
                listed[index] = pod["metadata"]["uid"]
        return listed

    def restarts(self, run: str, uids: Collection[str]) -> int:
        """How often the containers of these pods were started again."""
        pods = self.get("pods", "--selector", f"ddpctl.run={run}")
        counts = [
            entry for pod in pods if pod["metadata"]["uid"] in uids for entry in pod["status"]["containerStatuses"]
        ]
        return sum(entry["restartCount"] for entry in counts)

    def pod_name(self, run: str, uid: str) -> str:
        pods = self.get("pods", "--selector", f"ddpctl.run={run}")
        return next(str(pod["metadata"]["name"]) for pod in pods if pod["metadata"]["uid"] == uid)

    def evict(self, pod: str) -> None:
        """As a drain does it: the pod has its grace."""
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
        }
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        self.run("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction))

    def left_of(self, run: str) -> str:
        """Whatever has the run's label."""
        kinds = ["pods", "services", "configmaps", "secrets", "networkpolicies", "jobs"]
        served = self.run("api-resources", "--output", "name").split()
        kinds += [kind for kind in served if kind.split(".")[0] in ("pytorchjobs", "trainjobs", "trainingruntimes")]
        return self.run("get", ",".join(kinds), "--selector", f"ddpctl.run={run}", "--output", "name")

    def prepare_volume(self) -> bool:
        """A claim, or the folder on every machine, writable for the image's user; whether all see the same."""
        if not self.volume.startswith("/"):
            spec = {
                "storageClassName": self.storage_class,
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": "1Gi"}},
            }
            claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs"}, "spec": spec}
            self.run("create", "--filename", "-", stdin=json.dumps(claim))
            return True
        machines = [
            node["metadata"]["name"]
            for node in self.get("nodes")
            if not any(taint["effect"] == "NoSchedule" for taint in node["spec"].get("taints", ()))
        ]
        script = (
            f"mkdir -p {self.volume}/x && chmod 1777 {self.volume} && rmdir {self.volume}/x; touch {self.volume}/$0"
        )
        for number, machine in enumerate(machines):
            self._on(machine, f"prepare-{number}", script, f"saw-{self.namespace}-{number}")
        probe = f"ls {self.volume}"
        seen = self._on(machines[0], "look", probe, "")
        return all(f"saw-{self.namespace}-{number}" in seen for number in range(len(machines)))

    def _on(self, machine: str, name: str, script: str, word: str) -> str:
        """What a shell, as root, says on that machine."""
        parent = str(Path(self.volume).parent)
        container = {
            "name": "main",
            "image": self.image,
            "command": ["sh", "-c", script, word],
            "securityContext": {"runAsUser": 0},
            "volumeMounts": [{"name": "v", "mountPath": parent}],
        }
        volume = {"name": "v", "hostPath": {"path": parent}}
        spec = {"nodeName": machine, "restartPolicy": "Never", "containers": [container], "volumes": [volume]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        self.run("create", "--filename", "-", stdin=json.dumps(pod))
        wait_until(
            lambda: self.get(f"pod/{name}")[0]["status"].get("phase") in ("Succeeded", "Failed"), f"the pod {name}"
        )
        output = self.run("logs", name)
        self.run("delete", "pod", name)
        return output


def status(run: str) -> dict[str, object]:
    state: dict[str, object] = json.loads(ddpctl("status", run, "--json").stdout)
    return state


def logs(run: str, *options: str) -> str:
    return ddpctl("logs", run, *options).stdout


def step_of(run: str) -> int:
    """The last epoch that the log tells of; every pod's and every attempt's."""
    return max((int(number) for number in re.findall(r"epoch\s+(\d+)/", logs(run))), default=0)


def resumed_at(run: str) -> list[int]:
    return [int(number) for number in re.findall(r"continuing at step (\d+) of", logs(run))]


def fingerprint(text: str) -> str:
    return re.search(r"weights sha256\s+([0-9a-f]{16})", text)[1]  # type: ignore[index]


def name_of(word: str) -> str:
    return f"{word}-{uuid.uuid4().hex[:6]}"
