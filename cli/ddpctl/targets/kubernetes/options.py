"""The options of a target of kind kubernetes: what a cluster wants to know and a job does not say. Touches nothing."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from ddpctl.spec import Doc, JobSpec, Rule, check_env, check_size

Workload = Literal["auto", "pytorchjob", "trainjob", "job"]

_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_TOLERATION = re.compile(r"([^=:]+)(?:=([^=:]*))?(?::(NoSchedule|PreferNoSchedule|NoExecute))?")
_TIME = re.compile(r"([1-9][0-9]*)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DEFAULT_PROJECT = ("*.py",)


def is_object_name(name: str) -> bool:
    """Whether an object may be called so: a DNS subdomain (RFC 1123)."""
    return len(name) <= 253 and bool(_SUBDOMAIN.fullmatch(name))


def check_object_name(name: str) -> str:
    """The name of a Secret, a PriorityClass and so on."""
    if not is_object_name(name):
        raise ValueError("lower-case letters, digits, '-' and '.', as Kubernetes names its objects")
    return name


def check_namespace(name: str) -> str:
    """A namespace: a DNS label."""
    if not _LABEL.fullmatch(name):
        raise ValueError("lower-case letters, digits and '-', a letter first, at most 63 characters")
    return name


def check_text(text: str) -> str:
    """The name of a context: anything that fits on one line."""
    if not text or not text.isprintable() or text.startswith("-"):
        raise ValueError("one line of text that does not begin with '-'")
    return text


def check_key(key: str) -> str:
    """The key of a label, or the name of a resource: ``example.com/name``."""
    prefix, slash, name = key.rpartition("/")
    if not _LABEL_NAME.fullmatch(name) or (slash and not is_object_name(prefix)):
        raise ValueError("NAME or DOMAIN/NAME, as nvidia.com/gpu")
    return key


def check_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    """Keys and values that Kubernetes takes as labels."""
    for key, value in labels.items():
        try:
            check_key(key)
        except ValueError:
            raise ValueError(f"'{key}' is no key of a label: NAME or DOMAIN/NAME") from None
        if value and not _LABEL_NAME.fullmatch(value):
            raise ValueError(f"the value of {key}: letters, digits, '-', '_' and '.', at most 63 characters")
    return labels


def check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of objects."""
    for name in names:
        check_object_name(name)
    return names


def check_env_secrets(table: Mapping[str, str]) -> Mapping[str, str]:
    """``VARIABLE: SECRET/KEY``."""
    check_env(table)
    for variable, place in table.items():
        secret, slash, key = place.partition("/")
        if not slash or not is_object_name(secret) or not re.fullmatch(r"[-._A-Za-z0-9]{1,253}", key):
            raise ValueError(f"{variable}: SECRET/KEY is allowed: a Secret's name in the namespace and one of its keys")
    return table


def check_tolerations(texts: tuple[str, ...]) -> tuple[str, ...]:
    """``KEY``, ``KEY=VALUE``, each with ``:EFFECT`` or without."""
    for text in texts:
        match = _TOLERATION.fullmatch(text)
        if not match:
            raise ValueError(f"'{text}' is not KEY, KEY=VALUE or KEY=VALUE:NoSchedule|PreferNoSchedule|NoExecute")
        check_labels({match[1]: match[2] or ""})
    return texts


def toleration(text: str) -> dict[str, str]:
    """A toleration as Kubernetes spells it."""
    key, value, effect = _TOLERATION.fullmatch(text).groups()  # type: ignore[union-attr]
    spelled = {"key": key, "operator": "Exists"} if value is None else {"key": key, "value": value}
    return spelled | ({"effect": effect} if effect else {})


def check_time(text: str) -> str:
    """``1d``."""
    if not _TIME.fullmatch(text):
        raise ValueError("a whole number and s, m, h or d, such as 1d")
    return text


def seconds(text: str) -> int:
    """``1d`` in seconds."""
    return int(text[:-1]) * _SECONDS[text[-1]]


def check_globs(globs: tuple[str, ...]) -> tuple[str, ...]:
    """Patterns of files inside the project."""
    for glob in globs:
        if not glob or glob.startswith(("/", "-", "..")) or "\0" in glob or "\n" in glob:
            raise ValueError(f"{glob!r} is no pattern of files inside the project, such as '*.py' or 'conf/*.yaml'")
    return globs


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """The options of a target of kind kubernetes."""

    workload: Annotated[
        Workload,
        Doc("What runs it: pytorchjob (Kubeflow training-operator 1.7 to 1.9), trainjob (Kubeflow Trainer 2.2 and "
            "later), job (a plain Indexed Job); auto: the first of these that the cluster serves. --kind says it too."),
    ] = "auto"  # fmt: skip
    context: Annotated[str | None, Doc("The context of kubectl; null: its current one."), Rule(check_text)] = None
    namespace: Annotated[
        str | None, Doc("The namespace; null: the one that the context names, else default."), Rule(check_namespace)
    ] = None
    master: Annotated[
        bool,
        Doc("pytorchjob only: node 0 is a Master replica, as in Kubeflow's own examples, instead of the first Worker."),
    ] = False
    restart: Annotated[
        Literal["auto", "OnFailure", "ExitCode", "Never"],
        Doc("OnFailure: a container that failed starts again in its pod; ExitCode: an exit code below 128 ends the "
            "job, from 128 on the pod is replaced; Never: the first failure ends it; auto: OnFailure for a pytorchjob, "
            "else ExitCode."),
    ] = "auto"  # fmt: skip
    failures: Annotated[
        int, Doc("How many failures a node may have before the job is given up (backoffLimit is this x nodes)."),
        Ge(1), Le(1000),
    ] = 10  # fmt: skip
    clean_pods: Annotated[
        Literal["Running", "None", "All"],
        Doc("pytorchjob only: which pods go when the job has ended; None leaves running pods with their GPUs, All "
            "takes the logs with it."),
    ] = "Running"  # fmt: skip
    keep: Annotated[
        str | None,
        Doc("How long the ended job and its logs are kept, such as 30d; null: until ddpctl stop."),
        Rule(check_time),
    ] = "7d"
    scratch: Annotated[
        str | None,
        Doc("The most that a pod may write to its machine's disk: /tmp, its logs, and /runs without a mount; a pod "
            "that writes more is evicted. null: no limit."),
        Rule(check_size),
    ] = "50Gi"  # fmt: skip
    gpu_resource: Annotated[
        str, Doc("What the cluster calls a GPU: nvidia.com/gpu, amd.com/gpu, nvidia.com/mig-1g.10gb."), Rule(check_key)
    ] = "nvidia.com/gpu"
    request_cpus: Annotated[
        int | None, Doc("CPU cores that are reserved; null: the job's cpus, which are the limit, else one a rank."),
        Ge(1), Le(1024),
    ] = None  # fmt: skip
    request_memory: Annotated[
        str | None, Doc("Memory that is reserved; null: the job's memory, which is the limit, else 2Gi a rank."),
        Rule(check_size),
    ] = None  # fmt: skip
    pull: Annotated[Literal["IfNotPresent", "Always", "Never"], Doc("When the image is pulled.")] = "IfNotPresent"
    image_pull_secrets: Annotated[
        tuple[str, ...], Doc("Secrets of the namespace that hold the registry's password."), Rule(check_names)
    ] = ()
    env_secrets: Annotated[
        Mapping[str, str],
        Doc("Variables whose values are in Secrets of the namespace: VARIABLE: SECRET/KEY."),
        Rule(check_env_secrets),
    ] = field(default_factory=dict)
    project: Annotated[
        tuple[str, ...],
        Doc("Which files of the project go along as a ConfigMap, mounted at /workspace, when a script of your own runs "
            "(900 KiB at most); a file that looks like a secret only by its own name; empty: the image has them."),
        Rule(check_globs),
    ] = DEFAULT_PROJECT  # fmt: skip
    node_selector: Annotated[Mapping[str, str], Doc("Labels that a machine must have."), Rule(check_labels)] = field(
        default_factory=dict
    )
    tolerations: Annotated[
        tuple[str, ...], Doc("Taints that are borne: KEY, KEY=VALUE, KEY=VALUE:EFFECT."), Rule(check_tolerations)
    ] = ()
    lost_node: Annotated[
        int, Doc("Seconds until the pod of a machine that does not answer is replaced (the cluster's own is 300)."),
        Ge(0), Le(86400),
    ] = 60  # fmt: skip
    spread: Annotated[
        Literal["prefer", "require", "none"],
        Doc("Whether nodes of the run go to machines of their own: if they can, by all means, or as it comes."),
    ] = "prefer"
    together: Annotated[
        str | None,
        Doc("The label of machines (topology.kubernetes.io/zone, a rack) by which all nodes go to one place if able."),
        Rule(check_key),
    ] = None
    priority_class: Annotated[str | None, Doc("The PriorityClass of the pods."), Rule(check_object_name)] = None
    queue: Annotated[str | None, Doc("The queue of Kueue (its label), and of a gang."), Rule(check_object_name)] = None
    gang: Annotated[
        bool,
        Doc("All pods at once or none; needs an operator with a gang scheduler (--gang-scheduler-name), which says "
            "nothing where there is none."),
    ] = False  # fmt: skip
    scheduler: Annotated[
        str | None, Doc("The scheduler of the pods; null: the cluster's."), Rule(check_object_name)
    ] = None
    profile: Annotated[
        Literal["restricted", "rdma"],
        Doc("restricted: as Pod Security restricted wants it; rdma: InfiniBand's device, and root with IPC_LOCK, which "
            "only a privileged namespace admits."),
    ] = "restricted"  # fmt: skip
    rdma_resource: Annotated[str, Doc("What the cluster calls an InfiniBand device."), Rule(check_key)] = "rdma/hca"
    metrics_port: Annotated[int, Doc("The port of each node's metrics."), Ge(1024), Le(65535)] = 9500
    network_policy: Annotated[
        bool, Doc("Whether a NetworkPolicy keeps everybody but the run's own pods, and Prometheus, from its ports.")
    ] = True
    monitoring_namespace: Annotated[
        str, Doc("The namespace from which Prometheus may reach the metrics."), Rule(check_namespace)
    ] = "monitoring"
    labels: Annotated[
        Mapping[str, str], Doc("Further labels of the job and its pods, a team or a cost centre."), Rule(check_labels)
    ] = field(default_factory=dict)

    def problems(self, job: JobSpec) -> Iterable[tuple[str, str]]:
        """What a cluster would swallow, and that breaks as soon as it runs."""
        from ddpctl.targets.kubernetes.refusals import problems

        return problems(job, self)
