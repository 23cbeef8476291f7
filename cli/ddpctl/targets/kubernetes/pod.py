"""The pod template of a node, which is nearly the same for all kinds of workload."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath, PurePosixPath
from typing import Any

import yaml

from ddpctl.job.launch_plan import Plan, ddprun_args, program
from ddpctl.job.spec import JobSpec, size_bytes
from ddpctl.targets.kubernetes import pod_patch
from ddpctl.targets.kubernetes.options import (
    RUNS,
    SECRET_DIR,
    WORKSPACE,
    KubernetesOptions,
    holds,
    mounts_of,
    toleration,
)
from ddpwire import names, run_files

Object = dict[str, Any]
_PLAIN = re.compile(r"[A-Za-z/][-A-Za-z0-9_./ ]*[A-Za-z0-9/]|[A-Za-z/]")

# Words that a reader of YAML 1.1 may read as something other than text (https://yaml.org/type/).
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})
USER = 10001  # the user ID of the image
RUN_LABEL = "ddpctl.run"
UID_LABEL = "ddpctl.uid"  # distinguishes launches with the same name
_DISK = "ephemeral-storage"
PORT = 23456  # the operators' default, if the job sets none
SCRATCH = "1Gi"  # the disk space that a pod requests
SAVE_S = 30  # added to the ranks' grace period, for ddprun itself and for a checkpoint that is still being written
READER_LIVES_S = 6 * 3600
PLACEMENT = ("affinity", "imagePullSecrets", "nodeSelector", "schedulerName", "tolerations")  # of the pod reader, too
_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes no aliases. It quotes each text that a parser could take for another type."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    style = "|" if "\n" in text else None if is_plain else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(objects: Iterable[Object]) -> str:
    """Return objects as one stream of YAML documents."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=4096)


def literal(text: str) -> str:
    """Return the text with ``$`` escaped, so that Kubernetes does not expand ``$(NAME)`` in it."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def variables(values: Mapping[str, str]) -> list[Object]:
    """Return environment variables as entries of a container's ``env``."""
    return [{"name": name, "value": literal(value)} for name, value in values.items()]


def drop_empty(value: Object) -> Object:
    """Return the object without keys whose values are empty."""
    return {key: item for key, item in value.items() if item not in (None, {}, [], "")}


def manifest(api: str, kind: str, metadata: Object, **parts: Any) -> Object:
    """Return a manifest. ``parts`` are its other fields, such as ``spec`` or ``data``."""
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **parts}


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The values from which the manifests of a run are rendered. Its job and all other objects have the run's name."""

    plan: Plan
    options: KubernetesOptions
    project: Mapping[str, str]  # key in the ConfigMap → path in the project; empty if the image contains the code
    runtime: Mapping[str, Any] = field(default_factory=dict)  # the spec of the cluster's runtime, or empty

    @property
    def port(self) -> int:
        """The rendezvous port."""
        return self.plan.job.port or PORT

    @property
    def selector(self) -> dict[str, str]:
        """The labels that select the pods of every run with this name."""
        return {RUN_LABEL: self.plan.name}

    @property
    def labels(self) -> dict[str, str]:
        """The labels of all objects of the run. The label for the uid exists only if ddpctl launches the run."""
        ours = {"app.kubernetes.io/managed-by": "ddpctl", "app.kubernetes.io/name": self.plan.job.name}
        launch = {UID_LABEL: self.plan.uid} if self.plan.uid else {}
        return {**self.options.labels, **ours, **self.selector, **launch}

    @property
    def metadata(self) -> Object:
        """The metadata of every object of the run."""
        return drop_empty({"name": self.plan.name, "namespace": self.options.namespace, "labels": self.labels})


def needs_project(job: JobSpec) -> bool:
    """Return whether the ranks need code of the user's project.

    They need none if they run only ddptrain, or a script with an absolute path in the image.
    """
    argv = program(job.command)
    if argv[0] == "-m":
        return argv[1] != "ddptrain"
    return not PurePosixPath(argv[0]).is_absolute()


def checkpoint_dir(plan: Plan) -> str:
    """Return the folder of the checkpoints in the container. A resumed run uses the folder of the earlier run."""
    run = PurePath(plan.checkpoint_dir).parent.name or plan.name
    return f"{RUNS}/{run}/{run_files.CHECKPOINTS}"


def template(
    draft: Draft, *, container: str, port: tuple[str, int], place: list[Object], restart: str | None
) -> Object:
    """Return the pod template.

    ``place``: entries of ``env`` that give a node its rank and the address of node 0. ``restart``: the restart policy.
    """
    options, job = draft.options, draft.plan.job
    scraped = {  # read by a Prometheus server without its operator
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(options.metrics_port),
        "prometheus.io/path": "/metrics",
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": draft.selector},
    }
    result = {
        "metadata": {"labels": draft.labels, "annotations": scraped},
        "spec": drop_empty(
            {
                "restartPolicy": restart,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "terminationGracePeriodSeconds": math.ceil(job.stop_s) + SAVE_S,
                "securityContext": _pod_security(options),
                "tolerations": _tolerations(options, taken=[*scarce(job, options)]),
                "topologySpreadConstraints": [spread],
                "containers": [_container(draft, container, port, place)],
                "volumes": [item for item, _ in _volumes(draft)],
            }
        ),
    }
    defaults = tuple(name for name, value in (("cpu", job.cpus), ("memory", job.memory)) if not value)
    result = pod_patch.on_runtime(draft.runtime, result, defaults, gpu=options.gpu_resource)
    return pod_patch.apply(result, options.pod, container, fixed=tuple(scarce(job, options)))


def _container(draft: Draft, name: str, port: tuple[str, int], place: list[Object]) -> Object:
    options, job = draft.options, draft.plan.job
    ports = (port, ("metrics", options.metrics_port))
    # An operator sets PET_NNODES to a fixed number of nodes. The option takes precedence.
    elastic = ("--nnodes", job.nodes) if job.min_nodes != job.max_nodes else ()
    return {
        "name": name,
        "image": job.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["ddprun"],
        "args": [literal(word) for word in (*elastic, *ddprun_args(draft.plan))],
        "workingDir": WORKSPACE,
        "env": [*place, *_environment(draft)],
        "ports": [{"name": name, "containerPort": number} for name, number in ports],
        "resources": resources(job, options),
        "securityContext": _security(options),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [mount for _, mount in _volumes(draft)],
    }


def _environment(draft: Draft) -> list[Object]:
    job, options = draft.plan.job, draft.options
    values = {
        names.RUN_ID: draft.plan.name,
        **draft.plan.identity,
        names.RUN_DIR: f"{RUNS}/{draft.plan.name}",
        names.CHECKPOINT_DIR: checkpoint_dir(draft.plan),
        **draft.plan.store,
        names.METRICS_PORT: str(options.metrics_port),
        **({names.IMAGE: job.image} if draft.plan.uid else {}),  # a user may change the image in a rendered spec
        **({names.NODE_REPLACED: "1"} if job.max_nodes > 1 and options.restart != "Never" else {}),
        **({names.DEVICE: job.device} if job.device != "auto" else {}),
        names.SECRET_FILE: f"{SECRET_DIR}/{run_files.STORE_SECRET}",
        "HOME": "/tmp",  # noqa: S108 -- the container's only folder that every user may write to
        **job.env,
    }
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": draft.plan.name, "key": name}}} for name in job.secrets
    ]
    return [*variables({name: value for name, value in values.items() if name not in job.secrets}), *secrets]


def resources(job: JobSpec, options: KubernetesOptions) -> Object:
    """Return the resources that a pod requests, and their limits."""
    limits: dict[str, Any] = {"cpu": str(job.cpus) if job.cpus else None, "memory": job.memory}
    requests: dict[str, Any] = {
        "cpu": str(job.cpus or job.max_gpus),
        "memory": job.memory or f"{2 * job.max_gpus}Gi",
    }
    if options.scratch:
        limits[_DISK] = options.scratch
        requests[_DISK] = min(options.scratch, SCRATCH, key=size_bytes)
    few = scarce(job, options)
    return drop_empty({"requests": requests | few, "limits": drop_empty(limits) | few})


def scarce(job: JobSpec, options: KubernetesOptions) -> dict[str, str]:
    """Return the requested resources that only some machines have, such as GPUs."""
    gpus = {} if job.device == "cpu" else {options.gpu_resource: str(job.max_gpus)}
    return gpus | ({options.rdma_resource: "1"} if options.profile == "rdma" else {})


def _pod_security(options: KubernetesOptions) -> Object:
    user: Object = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
    user["fsGroupChangePolicy"] = "OnRootMismatch"
    if options.profile == "rdma":  # Kubernetes gives an added capability only to root
        user = {"runAsUser": 0, "runAsGroup": 0}
    return {**user, "seccompProfile": {"type": "RuntimeDefault"}}


def _security(options: KubernetesOptions) -> Object:
    added = {"add": ["IPC_LOCK"]} if options.profile == "rdma" else {}
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], **added},
    }


def _volumes(draft: Draft) -> list[tuple[Object, Object]]:
    job = draft.plan.job
    disk = {"sizeLimit": draft.options.scratch} if draft.options.scratch else {}
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shm_size}}
    pairs: list[tuple[Object, Object]] = [
        (shm, {"name": "shm", "mountPath": "/dev/shm"}),  # noqa: S108
        ({"name": "tmp", "emptyDir": disk}, {"name": "tmp", "mountPath": "/tmp"}),  # noqa: S108
    ]
    if not holds(job, f"{RUNS}/{draft.plan.name}"):
        pairs.append(({"name": "runs", "emptyDir": disk}, {"name": "runs", "mountPath": RUNS}))
    if draft.project:
        items = [{"key": key, "path": path} for key, path in draft.project.items()]
        project = {"name": "project", "configMap": {"name": draft.plan.name, "items": items}}
        pairs.append((project, {"name": "project", "mountPath": WORKSPACE, "readOnly": True}))
    # ddpctl launch creates the Secret. A rendered spec also works without it, but then the nodes sign nothing.
    files = {
        "secretName": draft.plan.name,
        "items": [{"key": run_files.STORE_SECRET, "path": run_files.STORE_SECRET}],
        "defaultMode": 0o400 if draft.options.profile == "rdma" else 0o440,  # for root, or for fsGroup
        "optional": True,
    }
    pairs.append(({"name": "secret", "secret": files}, {"name": "secret", "mountPath": SECRET_DIR, "readOnly": True}))
    for number, mount in enumerate(mounts_of(job)):
        name = f"mount-{number}"
        pairs.append((mount.volume(name), mount.volume_mount(name)))
    return pairs


def selector_of(run: str, uid: str) -> str:
    """Return the label selector for the pods of a launch. ``uid`` may be empty."""
    return f"{RUN_LABEL}={run}" + (f",{UID_LABEL}={uid}" if uid else "")


def is_ours(thing: Object, uid: str) -> bool:
    """Return whether an object with the run's name may belong to this launch: its uid is the same, or is unknown."""
    return not uid or thing["metadata"].get("labels", {}).get(UID_LABEL, uid) == uid


def reader_name(run: str, uid: str) -> str:
    """Return the name of the pod ``reader``."""
    return f"{run}-pull" + (f"-{uid}" if uid else "")


def reader(run: str, uid: str, job: JobSpec, options: KubernetesOptions, checkpoints: str) -> Object:
    """Return a Pod that mounts a run's PersistentVolumeClaims, so that ddpctl can read them when the run has no pods.

    The pod only sleeps. It ends by itself after ``READER_LIVES_S``.
    """
    labels = {**options.labels, "app.kubernetes.io/managed-by": "ddpctl"}
    metadata = drop_empty({"name": reader_name(run, uid), "namespace": options.namespace, "labels": labels})
    claims = [(f"mount-{number}", mount) for number, mount in enumerate(mounts_of(job)) if mount.kind == "pvc"]
    container = {
        "name": "reader",
        "image": job.image,
        "command": ["sleep", str(READER_LIVES_S)],
        "env": variables({names.RUN_DIR: f"{RUNS}/{run}", names.CHECKPOINT_DIR: checkpoints}),
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}},
        "securityContext": _security(options),
        "volumeMounts": [mount.volume_mount(name) | {"readOnly": True} for name, mount in claims],
    }
    spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": READER_LIVES_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(options),
        "tolerations": [toleration(text) for text in options.tolerations],
        "containers": [container],
        "volumes": [mount.volume(name) for name, mount in claims],
    }
    placed = {key: value for key, value in options.pod.get("spec", {}).items() if key in PLACEMENT}
    return manifest("v1", "Pod", metadata, spec=pod_patch.merge(drop_empty(spec), placed))


def _tolerations(options: KubernetesOptions, taken: list[str]) -> list[Object]:
    """Return a pod's tolerations: for machines with ``taken``, the scarce resources, for lost machines, and others."""
    lost = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": options.lost_node}
    return [
        *({"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in taken),
        *({"key": key, **lost} for key in _LOST),
        *map(toleration, options.tolerations),
    ]
