"""The objects of a run: its job, as each kind of workload writes it, and the objects beside the job. Pure.

PyTorchJob: kubeflow.org/v1 of the training-operator; TrainJob: trainer.kubeflow.org/v1alpha1 of Kubeflow Trainer;
Job: batch/v1, Indexed. The contract is the same in all three: what an operator does not set, the manifest sets.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from signal import SIGABRT, SIGHUP
from typing import Any

from ddpctl.spec import time_s
from ddpctl.targets.kubernetes.options import Workload as Word
from ddpctl.targets.kubernetes.pod import Draft, Object, drop_empty, template, variables
from ddpwire import names
from ddpwire.exits import Exit

KUEUE = "kueue.x-k8s.io/queue-name"
_ROLE = "training.kubeflow.org/replica-type"
_REPLICA = "training.kubeflow.org/replica-index"
_INDEX = "batch.kubernetes.io/job-completion-index"
TRAINJOB_PORT = 29500  # that the operator says, whatever a job wants

# What may go better the next time (docs/restarts.md): killed, absent, hung, saved; aborted, as by NCCL's watchdog. All
# else, a crash as well, ends the job.
RETRIED = tuple(sorted([128 + SIGHUP, 128 + SIGABRT, *(int(code) for code in Exit if code.retry)]))


def config_map(draft: Draft, files: Mapping[str, str]) -> Object:
    """The project's files; ``files``: path → content."""
    data = {key: files[path] for key, path in draft.project.items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": draft.metadata, "data": data}


def secret(draft: Draft, values: Mapping[str, str]) -> Object:
    """The values of the job's secrets. It goes to kubectl's stdin and nowhere else."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": draft.metadata,
        "type": "Opaque",
        "stringData": dict(values),
    }


def service(draft: Draft) -> Object:
    """The headless Service that gives the pods of a Job their names, also before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": draft.metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": draft.selector,
            "ports": [{"name": "rendezvous", "port": draft.port}],
        },
    }


def network_policy(draft: Draft) -> Object:
    """Who reaches a rendezvous can run code: the run's own pods alone; the metrics are for Prometheus as well."""
    monitoring = {"kubernetes.io/metadata.name": draft.options.monitoring_namespace}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": draft.metadata,
        "spec": {
            "podSelector": {"matchLabels": draft.selector},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": draft.selector}}]},
                {
                    "from": [{"namespaceSelector": {"matchLabels": monitoring}}],
                    "ports": [{"port": draft.options.metrics_port}],
                },
            ],
        },
    }


# Workloads: what each is called, how it is written down, how its pods are told apart


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One kind of workload."""

    word: Word  # in the options
    kind: str
    operator: str  # who makes pods of it
    resource: str  # for kubectl
    api: str  # its path, which the cluster answers if it serves it
    container: str  # the name that the operator looks for
    suspend: str  # the merge patch with %s for true or false
    job: Callable[[Draft], Object]
    before: Callable[[Draft], tuple[Object, ...]]  # what must be there when the job comes
    pod: Callable[[Draft], Object]  # the template, for a dry run of it as a bare Pod
    node: Callable[[Mapping[str, Any], bool], int]  # from a pod's metadata, and whether there is a Master: its node
    cascade: str = "foreground"  # of kubectl delete: the job is there until its pods have ended


def metadata_of(draft: Draft) -> Object:
    """The job's own metadata: with its queue."""
    queue = {KUEUE: draft.options.queue} if draft.options.queue else {}
    return {**draft.metadata, "labels": {**draft.labels, **queue}}


def backoff_limit(draft: Draft) -> int:
    """Restarts of all pods together."""
    return 0 if draft.options.restart == "Never" else draft.plan.job.max_nodes * draft.options.failures


def _pytorch_pod(draft: Draft) -> Object:
    job = draft.plan.job
    place: list[Object] = []
    if not draft.options.master:  # with a Master the operator says all of it
        rank = {"fieldRef": {"fieldPath": f"metadata.labels['{_REPLICA}']"}}
        place = [
            *variables({names.NNODES: str(job.max_nodes), names.NPROC_PER_NODE: str(job.local_world_size)}),
            {"name": names.NODE_RANK, "valueFrom": rank},
            *variables({names.NODE_MASTER_ADDR: f"{draft.name}-worker-0", names.NODE_MASTER_PORT: str(draft.port)}),
        ]
    return template(draft, container="pytorch", port=("pytorchjob-port", draft.port), place=place, restart=None)


def _pytorch_job(draft: Draft) -> Object:
    options, job = draft.options, draft.plan.job
    restart = "OnFailure" if options.restart == "auto" else options.restart
    pod = _pytorch_pod(draft)

    def replicas(number: int) -> Object:
        return {"replicas": number, "restartPolicy": restart, "template": pod}

    workers = job.max_nodes - options.master
    gang = drop_empty({"minAvailable": job.min_nodes, "queue": options.queue, "priorityClass": options.priority_class})
    policy = {
        "cleanPodPolicy": options.clean_pods,
        "backoffLimit": backoff_limit(draft),
        **({"ttlSecondsAfterFinished": time_s(options.keep)} if options.keep else {}),
        **({"schedulingPolicy": gang} if options.gang else {}),
    }
    roles = {"Master": replicas(1)} if options.master else {}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata_of(draft),
        "spec": {
            "nprocPerNode": str(job.local_world_size),
            "runPolicy": policy,
            "pytorchReplicaSpecs": {**roles, **({"Worker": replicas(workers)} if workers else {})},
        },
    }


def _job_pod(draft: Draft) -> Object:
    job = draft.plan.job
    place = {
        names.NNODES: str(job.max_nodes),
        names.NPROC_PER_NODE: str(job.local_world_size),
        names.NODE_MASTER_ADDR: f"{draft.name}-0.{draft.name}",
        names.NODE_MASTER_PORT: str(draft.port),
    }
    port = ("rendezvous", draft.port)
    pod = template(draft, container="main", port=port, place=variables(place), restart=_job_restart(draft))
    pod["spec"]["subdomain"] = draft.name
    return pod


def _train_pod(draft: Draft) -> Object:
    port = ("rendezvous", TRAINJOB_PORT)
    return template(draft, container="node", port=port, place=[], restart=_job_restart(draft))  # it says the place


def _job_restart(draft: Draft) -> str:
    return "OnFailure" if draft.options.restart == "OnFailure" else "Never"


def _job_spec(draft: Draft, container: str, pod: Object) -> Object:
    """What a Job does when a pod fails; a pod that was evicted or deleted costs nothing."""
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": container, "operator": "NotIn", "values": list(RETRIED)},
            "onPodConditions": [],  # required by the schema of Kubernetes 1.27
        },
    ]
    judged = draft.options.restart in ("auto", "ExitCode")
    return {
        "backoffLimit": backoff_limit(draft),
        **({"podFailurePolicy": {"rules": rules}} if judged else {}),
        "template": pod,
    }


def _indexed_job(draft: Draft) -> Object:
    nodes, keep = draft.plan.job.max_nodes, draft.options.keep
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata_of(draft),
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            **({"ttlSecondsAfterFinished": time_s(keep)} if keep else {}),
            **_job_spec(draft, "main", _job_pod(draft)),
        },
    }


def _train_job(draft: Draft) -> Object:
    job = draft.plan.job
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata_of(draft),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": draft.name},
            "trainer": {"numNodes": job.max_nodes, "numProcPerNode": job.local_world_size},
        },
    }


def _training_runtime(draft: Draft) -> Object:
    keep = draft.options.keep
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = {"metadata": {"labels": step}, "spec": _job_spec(draft, "node", _train_pod(draft))}
    jobs = {
        **({"ttlSecondsAfterFinished": time_s(keep)} if keep else {}),
        "network": {"publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": "node", "template": job}],
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": draft.metadata,
        "spec": {
            "mlPolicy": {"numNodes": draft.plan.job.max_nodes, "torch": {}},
            **({"podGroupPolicy": {"coscheduling": {}}} if draft.options.gang else {}),
            "template": {"spec": jobs},
        },
    }


def _replica(metadata: Mapping[str, Any], master: bool) -> int:
    labels = metadata.get("labels", {})
    return int(labels.get(_REPLICA, 0)) + (master and labels.get(_ROLE) == "worker")


def _index(metadata: Mapping[str, Any], _: bool) -> int:
    """Return a pod's index: an annotation in every version, also a label since Kubernetes 1.28."""
    found = {**metadata.get("annotations", {}), **metadata.get("labels", {})}
    return int(found.get(_INDEX, 0))


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
            suspend='{"spec":{"runPolicy":{"suspend":%s}}}',
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
            container="node",
            suspend='{"spec":{"suspend":%s}}',
            job=_train_job,
            before=lambda draft: (_training_runtime(draft),),
            pod=_train_pod,
            node=_index,
            # In the foreground its runtime goes first, and the webhook then refuses each update of the TrainJob, also
            # the one that removes its finalizer: it would stay for ever.
            cascade="background",
        ),
        Workload(
            word="job",
            kind="Job",
            operator="Kubernetes 1.27 or later, and no operator",
            resource="jobs.batch",
            api="/apis/batch/v1",
            container="main",
            suspend='{"spec":{"suspend":%s}}',
            job=_indexed_job,
            before=lambda draft: (service(draft),),
            pod=_job_pod,
            node=_index,
        ),
    )
}
