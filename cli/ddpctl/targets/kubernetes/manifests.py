"""Builds the manifests of a run: the manifest of its job, and the manifests of the objects that the job needs.

A job is one of three kinds of workload: PyTorchJob (kubeflow.org/v1, of the training-operator), TrainJob
(trainer.kubeflow.org/v1alpha1, of Kubeflow Trainer) or Indexed Job (batch/v1). Every pod gets the variables that ddprun
needs. The operator sets some of these variables, and the manifest sets the others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from signal import SIGABRT, SIGHUP
from typing import Any

from ddpctl.job.spec import time_s
from ddpctl.targets.kubernetes.options import Workload as Word
from ddpctl.targets.kubernetes.pod import Draft, Object, drop_empty, manifest, template, variables
from ddpctl.targets.kubernetes.pod_patch import NODE, extend, merge, replicated_job
from ddpwire import names
from ddpwire.exits import Exit

KUEUE = "kueue.x-k8s.io/queue-name"
SUSPENDED = "ddpctl.suspended"  # annotates a job that ddpctl, and no queue, has suspended
_ROLE = "training.kubeflow.org/replica-type"
_REPLICA = "training.kubeflow.org/replica-index"
_INDEX = "batch.kubernetes.io/job-completion-index"
TRAINJOB_PORT = 29500  # the operator always sets this port, even if the job asks for another

# Exit codes after which a pod is replaced (docs/restarts.md). SIGABRT may come from NCCL's watchdog. All other codes,
# including those of crashes, end the job.
RETRIED = tuple(sorted([128 + SIGHUP, 128 + SIGABRT, *(int(code) for code in Exit if code.retry)]))


def config_map(draft: Draft, files: Mapping[str, str]) -> Object:
    """Return the ConfigMap with the project's files. ``files`` maps each path to the file's text."""
    data = {key: files[path] for key, path in draft.project.items()}
    return manifest("v1", "ConfigMap", draft.metadata, data=data)


def secret(draft: Draft, values: Mapping[str, str]) -> Object:
    """Return the Secret with these values. Pass it only to kubectl's stdin, never on a command line."""
    return manifest("v1", "Secret", draft.metadata, type="Opaque", stringData=dict(values))


def service(draft: Draft) -> Object:
    """Return the headless Service of a Job, which gives its pods DNS names even before they are ready."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": draft.selector,
        "ports": [{"name": "rendezvous", "port": draft.port}],
    }
    return manifest("v1", "Service", draft.metadata, spec=spec)


def network_policy(draft: Draft) -> Object:
    """Return the policy that lets only the run's pods and Prometheus connect to the run's pods."""
    monitoring = {"kubernetes.io/metadata.name": draft.options.monitoring_namespace}
    spec = {
        "podSelector": {"matchLabels": draft.selector},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": {"matchLabels": draft.selector}}]},
            {
                "from": [{"namespaceSelector": {"matchLabels": monitoring}}],
                "ports": [{"port": draft.options.metrics_port}],
            },
        ],
    }
    return manifest("networking.k8s.io/v1", "NetworkPolicy", draft.metadata, spec=spec)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One kind of workload."""

    word: Word  # its name in the options
    kind: str
    operator: str  # the software that the cluster must have to create its pods
    resource: str  # its name for kubectl
    api: str  # the path of its API group on the API server
    container: str  # the name that the operator expects of the container
    job: Callable[[Draft], Object]
    before: Callable[[Draft], tuple[Object, ...]]  # the objects that must exist before the job
    pod: Callable[[Draft], Object]  # the pod template
    node: Callable[[Mapping[str, Any], bool], int]  # (a pod's metadata, whether there is a Master) → number of its node
    policy: str | None = None  # the field of its spec that has the field ``suspend``
    cascade: str = "foreground"  # for kubectl delete; foreground: the job exists until its pods have ended


def _patched(draft: Draft, api: str, kind: str, spec: Object) -> Object:
    """Return the manifest of a job or its runtime, with the user's patch for this kind. The job also has its queue."""
    queue = {KUEUE: draft.options.queue} if draft.options.queue and kind != "TrainingRuntime" else {}
    metadata = {**draft.metadata, "labels": {**draft.labels, **queue}}
    return extend(manifest(api, kind, metadata, spec=spec), draft.options.manifests)


def _time_to_live(draft: Draft) -> Object:
    keep = draft.options.keep
    return {"ttlSecondsAfterFinished": time_s(keep)} if keep else {}


def _backoff_limit(draft: Draft) -> int:
    """Return how many restarts are allowed for all pods together."""
    return 0 if draft.options.restart == "Never" else draft.plan.job.max_nodes * draft.options.failures


def _size(draft: Draft) -> list[Object]:
    """Return the variables with the numbers of nodes and ranks. A range of nodes is an argument instead (pod.py)."""
    job = draft.plan.job
    nodes = {names.NNODES: str(job.max_nodes)} if job.min_nodes == job.max_nodes else {}
    return variables({**nodes, names.NPROC_PER_NODE: str(job.local_world_size)})


def _address(draft: Draft, host: str) -> list[Object]:
    return variables({names.NODE_MASTER_ADDR: host, names.NODE_MASTER_PORT: str(draft.port)})


def _pytorch_pod(draft: Draft) -> Object:
    place: list[Object] = []
    if not draft.options.master:  # with a Master, the operator sets all these variables
        rank = {"name": names.NODE_RANK, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{_REPLICA}']"}}}
        place = [*_size(draft), rank, *_address(draft, f"{draft.plan.name}-worker-0")]
    return template(draft, container="pytorch", port=("pytorchjob-port", draft.port), place=place, restart=None)


def _pytorch_job(draft: Draft) -> Object:
    options, job = draft.options, draft.plan.job
    restart = "ExitCode" if options.restart == "auto" else options.restart
    replica = {"restartPolicy": restart, "template": _pytorch_pod(draft)}
    numbers = {"Master": int(options.master), "Worker": job.max_nodes - options.master}
    gang = drop_empty({"minAvailable": job.min_nodes, "queue": options.queue})
    policy = {
        "cleanPodPolicy": options.clean_pods,
        "backoffLimit": _backoff_limit(draft),
        **_time_to_live(draft),
        **({"schedulingPolicy": gang} if options.gang else {}),
    }
    spec = {
        "nprocPerNode": str(job.local_world_size),
        "runPolicy": policy,
        "pytorchReplicaSpecs": {role: {"replicas": number, **replica} for role, number in numbers.items() if number},
    }
    return _patched(draft, "kubeflow.org/v1", "PyTorchJob", spec)


def _job_pod(draft: Draft) -> Object:
    place = [*_size(draft), *_address(draft, f"{draft.plan.name}-0.{draft.plan.name}")]
    pod = _pod_of_job(draft, "main", draft.port, place)
    pod["spec"]["subdomain"] = draft.plan.name
    return pod


def _train_pod(draft: Draft) -> Object:
    return _pod_of_job(draft, NODE, TRAINJOB_PORT, place=[])  # the operator sets these variables


def _pod_of_job(draft: Draft, container: str, port: int, place: list[Object]) -> Object:
    restart = "OnFailure" if draft.options.restart == "OnFailure" else "Never"
    return template(draft, container=container, port=("rendezvous", port), place=place, restart=restart)


def _job_spec(draft: Draft, container: str, pod: Object) -> Object:
    """Return the fields that all Jobs have: the pod template, and the rules for failed pods.

    The eviction of a pod does not count as a failure, but its deletion does. With a limit for each index, the delays
    between failed pods (status.DELAY_S) are counted for each node. Otherwise the failures of all nodes add up.
    """
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": container, "operator": "NotIn", "values": list(RETRIED)},
            "onPodConditions": [],  # required by the schema of Kubernetes 1.28
        },
    ]
    judged = draft.options.restart in ("auto", "ExitCode")
    per_node = {"backoffLimitPerIndex": draft.options.failures if judged else 0, "maxFailedIndexes": 0}
    return {
        "backoffLimit": _backoff_limit(draft),
        **(per_node if draft.options.restart != "OnFailure" else {}),
        **({"podFailurePolicy": {"rules": rules}} if judged else {}),
        "template": pod,
    }


def _indexed_job(draft: Draft) -> Object:
    nodes = draft.plan.job.max_nodes
    counts = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes}
    spec = {**counts, **_time_to_live(draft), **_job_spec(draft, "main", _job_pod(draft))}
    return _patched(draft, "batch/v1", "Job", spec)


def _train_job(draft: Draft) -> Object:
    job = draft.plan.job
    spec = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": draft.plan.name},
        "trainer": {"numNodes": job.max_nodes, "numProcPerNode": job.local_world_size},
    }
    return _patched(draft, "trainer.kubeflow.org/v1alpha1", "TrainJob", spec)


def _training_runtime(draft: Draft) -> Object:
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = {"metadata": {"labels": step}, "spec": _job_spec(draft, NODE, pod={})}
    replicated = merge(replicated_job(draft.runtime), {"name": NODE, "template": job})
    replicated["template"]["spec"]["template"] = _train_pod(draft)
    alone = {"$patch": "replace"}  # Trainer computes the address of node 0 without regard to the network
    jobs = {
        **_time_to_live(draft),
        "network": {**alone, "publishNotReadyAddresses": True},
        "replicatedJobs": [replicated],
    }
    spec = {
        "mlPolicy": {**alone, "numNodes": draft.plan.job.max_nodes, "torch": {}},
        **({"podGroupPolicy": {"coscheduling": {}}} if draft.options.gang else {}),
        "template": {"spec": jobs},
    }
    return _patched(draft, "trainer.kubeflow.org/v1alpha1", "TrainingRuntime", merge({**draft.runtime}, spec))


def _replica(metadata: Mapping[str, Any], master: bool) -> int:
    labels = metadata.get("labels", {})
    return int(labels.get(_REPLICA, 0)) + (master and labels.get(_ROLE) == "worker")


def _index(metadata: Mapping[str, Any], _: bool) -> int:
    return int(metadata.get("labels", {}).get(_INDEX, 0))


WORKLOADS: Mapping[str, Workload] = {
    workload.word: workload
    for workload in (
        Workload(
            word="pytorchjob",
            kind="PyTorchJob",
            operator="Kubeflow's training-operator 1.7 to 1.9 in the cluster",
            resource="pytorchjobs.kubeflow.org",
            api="/apis/kubeflow.org/v1",
            container="pytorch",
            policy="runPolicy",
            job=_pytorch_job,
            before=lambda _: (),
            pod=_pytorch_pod,
            node=_replica,
        ),
        Workload(
            word="trainjob",
            kind="TrainJob",
            operator="Kubeflow Trainer 2.2 or later in the cluster",
            resource="trainjobs.trainer.kubeflow.org",
            api="/apis/trainer.kubeflow.org/v1alpha1",
            container=NODE,
            job=_train_job,
            before=lambda draft: (_training_runtime(draft),),
            pod=_train_pod,
            node=_index,
            # A foreground deletion deletes the runtime first. Then the webhook refuses every update of the TrainJob,
            # including the one that removes its finalizer, so that the TrainJob would stay forever.
            cascade="background",
        ),
        Workload(
            word="job",
            kind="Job",
            operator="Kubernetes 1.28 or later, and no operator",
            resource="jobs.batch",
            api="/apis/batch/v1",
            container="main",
            job=_indexed_job,
            before=lambda draft: (service(draft),),
            pod=_job_pod,
            node=_index,
        ),
    )
}
