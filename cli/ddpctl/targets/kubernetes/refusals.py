"""What the API server, the webhook or nobody refuses, and that breaks as soon as the job runs. Pure.

Each is a key of the file (``job.gpus``, ``target.restart``) and a sentence. What a field may hold by itself is
said by its rule; here stands what only two of them together make wrong.
"""

from collections.abc import Iterator

from ddpctl.spec import JobSpec, size_bytes
from ddpctl.targets.kubernetes.mounts import KINDS, Mount, is_claim, mounts_of
from ddpctl.targets.kubernetes.options import KubernetesOptions

LONGEST = 63  # a DNS label: a pod's hostname, a Service
LONGEST_WORD = 9  # what a run's name has beside its job's: -saffron
OURS = ("/dev/shm", "/tmp")  # noqa: S108 -- paths in the container
_LABELS = ("app.kubernetes.io/managed-by", "app.kubernetes.io/name", "ddpctl.run")


def suffix(workload: str, max_nodes: int) -> int:
    """How many characters a workload adds to the run's name for its longest pod."""
    last = len(str(max_nodes - 1))
    return last + {"trainjob": len("-node-0--xxxxx"), "job": len("--xxxxx")}.get(workload, len("-worker-"))


def name_problem(name: str, workload: str, max_nodes: int) -> str | None:
    """Why this name is too long, if it is."""
    most = LONGEST - suffix(workload, max_nodes)
    if len(name) <= most:
        return None
    return (
        f"{name!r} has {len(name)} characters: with the pods' own endings more than {LONGEST}, which no Service takes: "
        f"at most {most}"
    )


def problems(job: JobSpec, options: KubernetesOptions) -> Iterator[tuple[str, str]]:
    """All that is wrong, in the order of the file's keys."""
    most = LONGEST - suffix(options.workload, job.max_nodes) - LONGEST_WORD
    if len(job.name) > most:
        yield (
            "job.name",
            f"{job.name!r} has {len(job.name)} characters, and with a run's word and the pods' own endings it may not "
            f"have more than {LONGEST}: at most {most}",
        )
    yield from _of_sizes(job, options)
    yield from _of_mounts(job)
    yield from _of_workload(job, options)
    yield from _of_variables(job, options)
    for key in options.labels:
        if key in _LABELS or key.startswith(("training.kubeflow.org/", "batch.kubernetes.io/", "jobset.sigs.k8s.io/")):
            yield "target.labels", f"{key} is set by ddpctl or the cluster"


def _of_sizes(job: JobSpec, options: KubernetesOptions) -> Iterator[tuple[str, str]]:
    if job.memory and job.shm and size_bytes(job.shm) > size_bytes(job.memory):
        yield "job.shm", f"{job.shm} is more than the node's memory, {job.memory}, of which it is a part: ask for less"
    if options.request_cpus and not job.cpus:
        yield "target.request_cpus", "a reserve needs a limit: give the job's cpus as well"
    elif options.request_cpus and job.cpus and options.request_cpus > job.cpus:
        yield (
            "target.request_cpus",
            f"{options.request_cpus} is above the limit, the job's cpus, {job.cpus}: no pod would be made",
        )
    if options.request_memory and not job.memory:
        yield "target.request_memory", "a reserve needs a limit: give the job's memory as well"
    elif options.request_memory and job.memory and size_bytes(options.request_memory) > size_bytes(job.memory):
        yield (
            "target.request_memory",
            f"{options.request_memory} is above the limit, the job's memory, {job.memory}: no pod would be made",
        )


def _of_mounts(job: JobSpec) -> Iterator[tuple[str, str]]:
    paths: set[str] = set()
    for mount in mounts_of(job):
        if said := _of_mount(mount, paths):
            yield "job.mounts", said
        paths.add(mount.path)


def _of_mount(mount: Mount, before: set[str]) -> str | None:
    if mount.path in before:
        return f"{mount.path} is there twice"
    if mount.path in OURS:
        return f"{mount.path} is ddpctl's: shm says its size" if mount.path == OURS[0] else f"{mount.path} is ddpctl's"
    if ".." in mount.path.split("/"):
        return f"{mount.path!r}: no '..' in a path of a container"
    if mount.kind == "path":
        if not mount.source.startswith("/") or ".." in mount.source.split("/"):
            return (
                f"{mount.source!r} is no path of a machine: /PATH, pvc=CLAIM, secret=NAME or configmap=NAME is allowed"
            )
    elif not is_claim(mount.source):
        return f"{mount.source!r} is no name of a {KINDS[mount.kind]}: lower-case letters, digits, '-' and '.'"
    return None


def _of_workload(job: JobSpec, options: KubernetesOptions) -> Iterator[tuple[str, str]]:
    if options.master and job.min_nodes != job.max_nodes:
        yield (
            "target.master",
            f"nodes {job.nodes} have no Master, whose loss would end them: false, or a number of nodes",
        )
    if options.master and options.workload in ("trainjob", "job"):
        yield "target.master", f"a {options.workload} has no Master: false, or workload pytorchjob"
    if job.port and options.workload == "trainjob":
        yield "job.port", f"{job.port}, but a TrainJob's operator says 29500: leave it out"
    if options.gang and options.workload == "job":
        yield "target.gang", "a plain Job has no gang: a queue of Kueue, or another workload"
    if options.metrics_port == (job.port or 0):
        yield "job.port", f"{job.port} is the port of the metrics already (metrics_port): give another"
    if options.restart == "Never" and job.max_restarts:
        yield "target.restart", f"Never, but max_restarts is {job.max_restarts}: one of the two"


def _of_variables(job: JobSpec, options: KubernetesOptions) -> Iterator[tuple[str, str]]:
    for name in options.env_secrets:
        if name in job.env or name in job.secrets:
            yield "target.env_secrets", f"{name} is in the job's {'env' if name in job.env else 'secrets'} as well"
    for name in job.secrets:
        if name in job.env:
            yield "job.secrets", f"{name} is in env as well: take it out of one"
    for name in job.env:
        if name.startswith("JOB_COMPLETION_") or name in ("KUBERNETES_SERVICE_HOST", "HOSTNAME"):
            yield "job.env", f"{name} is set by Kubernetes"
