"""What Kubernetes and Kubeflow's operators make of a rendered pod: its arguments and its variables, in their order.

From the sources of kubeflow/training-operator v1.9.0 (pkg/controller.v1/pytorch/envvar.go, elastic.go) and
kubeflow/trainer v2.3.0 (pkg/runtime/framework/plugins/torch); an operator appends after the pod's own, and the last of
two wins.
"""

import atexit
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from tests.unit.ddpctl.kubernetes_lab import expand

from ddpctl.targets.kubernetes.manifests import WORKLOADS
from ddpctl.targets.kubernetes.options import SECRET_DIR
from ddpctl.targets.kubernetes.pod import Draft
from ddpwire import names

Object = dict[str, Any]
NO_SECRET = TemporaryDirectory()  # what the kubelet mounts if the optional Secret does not exist
atexit.register(NO_SECRET.cleanup)


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod as its container sees itself."""

    name: str  # and its hostname
    names: tuple[str, ...]  # under which the others find it
    args: tuple[str, ...]
    env: dict[str, str]


def pods_of(draft: Draft, word: str) -> tuple[Pod, ...]:
    """The pods of a rendered job."""
    job = WORKLOADS[word].job(draft)
    if word == "pytorchjob":
        return _pytorch_pods(job)
    template = WORKLOADS[word].pod(draft)
    number = draft.plan.job.max_nodes
    return tuple(
        (_train_pod if word == "trainjob" else _indexed_pod)(draft.plan.name, template, i, job) for i in range(number)
    )


def _pytorch_pods(job: Object) -> tuple[Pod, ...]:
    roles, name = job["spec"]["pytorchReplicaSpecs"], job["metadata"]["name"]
    total = sum(role["replicas"] for role in roles.values())
    made = []
    for role, replicas in roles.items():
        for index in range(replicas["replicas"]):
            pod = f"{name}-{role.lower()}-{index}"
            labels = {
                "training.kubeflow.org/job-name": name,
                "training.kubeflow.org/replica-type": role.lower(),
                "training.kubeflow.org/replica-index": str(index),
            }
            environ = {"PYTHONUNBUFFERED": "1"}
            if "Master" in roles:
                rank = str(index if role == "Master" else index + 1)
                nproc = job["spec"]["nprocPerNode"]
                port = next(
                    entry["containerPort"]
                    for entry in roles["Master"]["template"]["spec"]["containers"][0]["ports"]
                    if entry["name"] == "pytorchjob-port"
                )
                world = total * (int(nproc) if nproc.isdecimal() else 1)
                environ |= {
                    "MASTER_PORT": str(port),
                    "PET_MASTER_PORT": str(port),
                    "MASTER_ADDR": f"{name}-master-0",
                    "PET_MASTER_ADDR": f"{name}-master-0",
                    "WORLD_SIZE": str(world),
                    "RANK": rank,
                    "PET_NODE_RANK": rank,
                }
            environ |= {"PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"], "PET_NNODES": str(total)}
            if elastic := job["spec"].get("elasticPolicy"):
                environ |= {
                    "PET_RDZV_ENDPOINT": f"{name}-worker-0:23456",
                    "PET_RDZV_BACKEND": elastic.get("rdzvBackend", "c10d"),
                    "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
                    **({"PET_MAX_RESTARTS": str(elastic["maxRestarts"])} if "maxRestarts" in elastic else {}),
                }
            made.append(_pod(pod, (pod,), replicas["template"], labels, environ))
    return tuple(made)


def _train_pod(name: str, template: Object, index: int, job: Object) -> Pod:
    trainer = job["spec"]["trainer"]
    host = f"{name}-node-0-{index}"
    environ = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }
    return _pod(host, (f"{host}.{name}", host), template, {}, {**environ, "JOB_COMPLETION_INDEX": str(index)})


def _indexed_pod(name: str, template: Object, index: int, _: Object) -> Pod:
    host = f"{name}-{index}"
    return _pod(host, (f"{host}.{name}", host), template, {}, {"JOB_COMPLETION_INDEX": str(index)})


def _pod(host: str, hosts: tuple[str, ...], template: Object, labels: dict[str, str], environ: dict[str, str]) -> Pod:
    (container,) = template["spec"]["containers"]
    labels = {**template["metadata"]["labels"], **labels}
    own = {entry["name"]: _value(entry, labels) for entry in container["env"]}
    own[names.SECRET_FILE] = own[names.SECRET_FILE].replace(SECRET_DIR, NO_SECRET.name)
    cluster = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443", "HOSTNAME": host}
    args = tuple(expand(word) for word in container["args"])
    return Pod(name=host, names=hosts, args=args, env={**cluster, **own, **environ})


def _value(entry: Object, labels: dict[str, str]) -> str:
    if "value" in entry:
        return expand(entry["value"])
    path = entry["valueFrom"]["fieldRef"]["fieldPath"]
    return labels[path.removeprefix("metadata.labels['").removesuffix("']")]
