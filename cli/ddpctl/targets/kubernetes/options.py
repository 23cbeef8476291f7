"""The options of a target of kind kubernetes, and a job's mounts on Kubernetes."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from ddpctl.job.spec import JobSpec, check_size, check_time, size_bytes
from ddpctl.job.values import Options, Rule, Table, Words, between, matching
from ddpctl.targets.kubernetes.pod_patch import KINDS
from ddpwire.machine import MAX_PORT

Workload = Literal["auto", "pytorchjob", "trainjob", "job"]
_LABEL_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"  # RFC 1123
_OBJECT_NAME = rf"(?=.{{1,253}}$){_SUBDOMAIN}"  # of a Secret, a PriorityClass or another object
OBJECT_NAME = matching(_OBJECT_NAME, "lower-case letters, digits, '-' and '.', as Kubernetes names its objects")
NAMESPACE = matching(
    r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", "lower-case letters, digits and '-', a letter first, at most 63 characters"
)
_KEY = rf"((?=[^/]{{1,253}}/){_SUBDOMAIN}/)?{_LABEL_NAME}"  # of a label, or the name of a resource
RUNTIME = matching(
    rf"((Cluster)?TrainingRuntime/)?{_OBJECT_NAME}", "NAME of a ClusterTrainingRuntime, or TrainingRuntime/NAME"
)
KEY = matching(_KEY, "NAME or DOMAIN/NAME, as nvidia.com/gpu")
CONTEXT = matching(r"(?!-)[^\x00-\x1f\x7f-\x9f]+", "one line of text that does not begin with '-'")
TOLERATIONS = matching(
    rf"{_KEY}(=({_LABEL_NAME})?)?(:(PreferNoSchedule|NoSchedule|NoExecute))?",
    "'{}' is not KEY, KEY=VALUE or KEY=VALUE:NoSchedule|PreferNoSchedule|NoExecute",
)
GLOBS = matching(
    r"(?![-/]|\.\.)[^\0\n]+", "{!r} is not a pattern of files inside the project, such as '*.py' or 'conf/*.yaml'"
)
DEFAULT_PROJECT = ("*.py",)
RUNS = "/runs"  # contains the run's folder
WORKSPACE = "/workspace"
Kind = Literal["pvc", "secret", "configmap", "path"]
SOURCES: dict[Kind, str] = {"pvc": "claim", "secret": "Secret", "configmap": "ConfigMap", "path": "path"}
LONGEST = 63  # the limit of a DNS label, for a pod's hostname or a Service
LONGEST_WORD = 9  # what a run's name adds to its job's name, such as -saffron
SECRET_DIR = "/etc/ddpctl"  # noqa: S105 -- contains the secret with which the nodes sign values
OURS = ("/dev/shm", "/tmp", SECRET_DIR)  # noqa: S108 -- paths in the container
_LABELS = ("app.kubernetes.io/managed-by", "app.kubernetes.io/name", "ddpctl.run", "ddpctl.uid")


def check_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    """Check that these are valid labels of Kubernetes. Raises ValueError."""
    for key, value in labels.items():
        if not re.fullmatch(_KEY, key):
            raise ValueError(f"'{key}' is not a label key: NAME or DOMAIN/NAME")
        if value and not re.fullmatch(_LABEL_NAME, value):
            raise ValueError(f"the value of {key}: letters, digits, '-', '_' and '.', at most 63 characters")
    return labels


def toleration(text: str) -> dict[str, str]:
    """Return the toleration for a text ``KEY[=VALUE][:EFFECT]``, in the form that a pod's spec needs."""
    pair, _, effect = text.partition(":")
    key, equals, value = pair.partition("=")
    rule = {"key": key, "value": value} if equals else {"key": key, "operator": "Exists"}
    return rule | ({"effect": effect} if effect else {})


def check_kinds(patches: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check that each patch is one of a kind that has patches. Raises ValueError."""
    for kind, patch in patches.items():
        if kind not in KINDS or not isinstance(patch, Mapping):
            raise ValueError(f"'{kind}': expected one of {', '.join(KINDS)}, each with a patch")
    return patches


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions(Options):
    """The options of a target of kind kubernetes."""

    workload: Workload = "auto"
    """The kind of object: pytorchjob (Kubeflow training-operator 1.7 to 1.9), trainjob (Kubeflow Trainer 2.2 and
    later), job (a plain Indexed Job); auto: the first of these that the cluster supports."""
    context: Annotated[str, CONTEXT] | None = None
    """The kubectl context. null: the current context."""
    namespace: Annotated[str, NAMESPACE] | None = None
    """The namespace. null: the context's namespace, else default."""
    master: bool = False
    """For pytorchjob: whether node 0 is a Master replica, as in Kubeflow's examples, instead of the first Worker."""
    runtime: Annotated[str, RUNTIME] | None = None
    """For trainjob: a runtime of the cluster whose fields the run's own TrainingRuntime also gets: the NAME of a
    ClusterTrainingRuntime, or TrainingRuntime/NAME. null: none."""
    restart: Literal["auto", "OnFailure", "ExitCode", "Never"] = "auto"
    """ExitCode: an exit code below 128 ends the job, any other replaces the pod; OnFailure: a failed container restarts
    in its pod, even after an error of the script; Never: the first failure ends the job; auto: ExitCode."""
    failures: Annotated[int, between(1, 1000)] = 10
    """Number of failures per node after which the job fails (backoffLimit is this number times the number of nodes)."""
    clean_pods: Literal["Running", "None", "All"] = "Running"
    """For pytorchjob: which pods are deleted when the job has ended. None: running pods keep their GPUs; All: the logs
    are deleted too."""
    keep: Annotated[str, Rule(partial(check_time, example="1d"))] | None = "7d"
    """How long an ended job and its logs are kept, such as 30d. null: until ddpctl stop."""
    scratch: Annotated[str, Rule(check_size)] | None = "50Gi"
    """Largest amount that a pod may write to its machine's disk (/tmp, its logs, and /runs without a mount); Kubernetes
    evicts a pod that writes more. null: no limit."""
    gpu_resource: Annotated[str, KEY] = "nvidia.com/gpu"
    """The cluster's resource name of a GPU, such as nvidia.com/gpu, amd.com/gpu or nvidia.com/mig-1g.10gb."""
    project: Annotated[Words, GLOBS] = DEFAULT_PROJECT
    """Patterns of project files that are sent in a ConfigMap and mounted at /workspace, if the command is your own
    script (at most 900 KiB). A file that looks like a secret is sent only if it is named exactly. Empty: the files are
    in the image."""
    tolerations: Annotated[Words, TOLERATIONS] = ()
    """Taints that the pods tolerate: KEY, KEY=VALUE, KEY=VALUE:EFFECT."""
    lost_node: Annotated[int, between(0, 86400)] = 60
    """Seconds after which the pods of an unreachable machine are deleted (the cluster's default is 300)."""
    replace_lost: bool = False
    """Whether an attached launch deletes the pod of a machine that has been unreachable for lost_node plus the pod's
    grace period, so that it is replaced. Use it only if such machines are really gone."""
    queue: Annotated[str, OBJECT_NAME] | None = None
    """The queue for Kueue (as its label) and for the gang scheduler."""
    gang: bool = False
    """Schedule all pods at once or none. Needs an operator with a gang scheduler (--gang-scheduler-name); without one
    this has no effect, and no message says so."""
    profile: Literal["restricted", "rdma"] = "restricted"
    """restricted: as Pod Security's level restricted requires; rdma: with an InfiniBand device, as root with IPC_LOCK,
    which only a privileged namespace allows."""
    rdma_resource: Annotated[str, KEY] = "rdma/hca"
    """The cluster's resource name of an InfiniBand device."""
    metrics_port: Annotated[int, between(1024, MAX_PORT)] = 9500
    """The port of each node's metrics."""
    network_policy: bool = True
    """Whether a NetworkPolicy allows only the run's pods and Prometheus to reach the run's ports."""
    monitoring_namespace: Annotated[str, NAMESPACE] = "monitoring"
    """The namespace from which Prometheus may reach the metrics."""
    labels: Annotated[Table, Rule(check_labels)] = field(default_factory=dict)
    """More labels for the job and its pods, such as a team or a cost center."""
    pod: Mapping[str, Any] = field(default_factory=dict)
    """A strategic merge patch of the pod template, with metadata and spec, for whatever no other option sets:
    annotations, nodeSelector, runtimeClassName, volumes. The container of the ranks is called main."""
    manifests: Annotated[Mapping[str, Any], Rule(check_kinds)] = field(default_factory=dict)
    """A strategic merge patch for each of the kinds PyTorchJob, TrainJob, TrainingRuntime and Job, which adds what no
    other option sets: annotations, schedulingPolicy, podGroupPolicy."""

    def problems(self, job: JobSpec) -> Iterator[tuple[str, str]]:
        """For each setting that would make the job fail, yield its key and an error message."""
        if problem := name_problem(job.name, self.workload, job.max_nodes, more=LONGEST_WORD):
            yield "job.name", problem
        if job.memory and job.shm and size_bytes(job.shm) > size_bytes(job.memory):
            yield "job.shm", f"{job.shm} is more than the job's memory, {job.memory}, which includes it: use less"
        mounts = mounts_of(job)
        for number, mount in enumerate(mounts):
            if problem := mount.problem([earlier.path for earlier in mounts[:number]]):
                yield "job.mounts", problem
        yield from self._problems_of_workload(job)
        for name in filter(job.env.__contains__, job.secrets):
            yield "job.secrets", f"{name} is in env as well: remove it from one of the two"
        for name in job.env:
            if name.startswith("JOB_COMPLETION_") or name in ("KUBERNETES_SERVICE_HOST", "HOSTNAME"):
                yield "job.env", f"{name} is set by Kubernetes"
        theirs = ("training.kubeflow.org/", "batch.kubernetes.io/", "jobset.sigs.k8s.io/")
        for key in self.labels:
            if key in _LABELS or key.startswith(theirs):
                yield "target.labels", f"{key} is set by ddpctl or the cluster"

    def _problems_of_workload(self, job: JobSpec) -> Iterator[tuple[str, str]]:
        if self.master and job.min_nodes != job.max_nodes:
            text = f"a Master needs a fixed number of nodes, but nodes is '{job.nodes}'"
            yield "target.master", f"{text}: set master to false, or nodes to a single number"
        if self.master and self.workload in ("trainjob", "job"):
            yield "target.master", f"a {self.workload} has no Master: set master: false, or workload: pytorchjob"
        if self.runtime and self.workload != "trainjob":
            yield "target.runtime", "only a TrainJob has a runtime: set workload: trainjob"
        if job.port and self.workload == "trainjob":
            yield "job.port", f"{job.port}, but a TrainJob's operator always uses 29500: leave it out"
        if self.gang and self.workload == "job":
            yield "target.gang", "a plain Job cannot be scheduled as a gang: use a queue of Kueue, or another workload"
        if self.metrics_port == (job.port or 0):
            yield "job.port", f"{job.port} is already the port of the metrics (metrics_port): choose another"
        if self.restart == "Never" and job.max_restarts:
            yield "target.restart", f"Never, but max_restarts is {job.max_restarts}: change one of the two"


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One entry of a job's mounts: a path of the machine, a PersistentVolumeClaim, a Secret or a ConfigMap."""

    kind: Kind
    source: str  # the path on the machine, or the object's name
    path: str  # in the container
    read_only: bool

    def problem(self, earlier: Collection[str]) -> str | None:
        """Return an error message if the mount is impossible. ``earlier``: the paths of the mounts before it."""
        if self.path in earlier:
            return f"{self.path} is given twice"
        if self.path in OURS:
            return f"ddpctl mounts {self.path} itself{': set its size with shm' if self.path == OURS[0] else ''}"
        if ".." in self.path.split("/"):
            return f"{self.path!r}: a path in the container may not contain '..'"
        if self.kind != "path":
            is_name = re.fullmatch(_OBJECT_NAME, self.source)
            expected = f"the name of a {SOURCES[self.kind]}: lower-case letters, digits, '-' and '.'"
            return None if is_name else f"{self.source!r} is not {expected}"
        if self.source.startswith("/") and ".." not in self.source.split("/"):
            return None
        return f"{self.source!r} is not a path of a machine: expected /PATH, pvc=CLAIM, secret=NAME or configmap=NAME"

    def volume(self, name: str) -> dict[str, Any]:
        """Return the entry in a pod's ``volumes`` for this mount."""
        sources: dict[Kind, dict[str, Any]] = {
            "pvc": {"persistentVolumeClaim": {"claimName": self.source}},
            "secret": {"secret": {"secretName": self.source, "defaultMode": 0o440}},
            "configmap": {"configMap": {"name": self.source}},
            "path": {"hostPath": {"path": self.source}},
        }
        return {"name": name, **sources[self.kind]}

    def volume_mount(self, name: str) -> dict[str, Any]:
        """Return the entry in a container's ``volumeMounts`` for this mount."""
        return {"name": name, "mountPath": self.path, **({"readOnly": True} if self.read_only else {})}


def mounts_of(job: JobSpec) -> tuple[Mount, ...]:
    """Parse the job's mounts."""
    mounts = []
    for text in job.mounts:
        source, path, *rest = text.split(":")
        kind: Kind = next((kind for kind in SOURCES if source.startswith(f"{kind}=")), "path")
        read_only = bool(rest) or kind in ("secret", "configmap")
        name = source if kind == "path" else source.partition("=")[2]
        mounts.append(Mount(kind=kind, source=name, path=str(PurePosixPath(path)), read_only=read_only))
    return tuple(mounts)


def holds(job: JobSpec, path: str) -> Mount | None:
    """Return the innermost mount that contains ``path``, or None if no mount contains it."""
    outer = [mount for mount in mounts_of(job) if PurePosixPath(path).is_relative_to(mount.path)]
    return max(outer, key=lambda mount: len(PurePosixPath(mount.path).parts), default=None)


def name_problem(name: str, workload: str, max_nodes: int, *, more: int = 0) -> str | None:
    """Return an error message if a run's name is too long for the names of its pods, or None.

    ``more``: how many characters will be added to the name.
    """
    ending = {"trainjob": "-node-0--xxxxx", "job": "--xxxxx"}.get(workload, "-worker-")  # what a pod's name adds
    most = LONGEST - more - len(ending) - len(str(max_nodes - 1))
    if len(name) <= most:
        return None
    reason = f"the names of the run's pods are longer, and Kubernetes limits them to {LONGEST} characters"
    return f"{name!r} has {len(name)} characters, but at most {most} are allowed ({reason})"
