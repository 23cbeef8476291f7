"""What a person should know of a run or a spec that nobody refuses: one sentence each. Pure."""

import shlex
from collections.abc import Iterator, Mapping, Sequence

from ddpctl.plan import counted, script_of
from ddpctl.targets.kubernetes.kubectl import Kubectl
from ddpctl.targets.kubernetes.mounts import RUNS, WORKSPACE, holds, mounts_of
from ddpctl.targets.kubernetes.pod import Draft, needs_project
from ddpctl.words import one_line

MOST_NAMES = 10


def of_spec(draft: Draft, operator: str) -> Iterator[str]:
    """What a spec that is applied without ddpctl needs beside it; ``operator``: what makes pods of its job."""
    job, options = draft.plan.job, draft.options
    yield from (f"Needs {thing}." for thing in (operator, *_needs(draft)))
    if needs_project(job):
        what = one_line(script_of(job.command) or "the project")
        yield f"The image must have {what} in {WORKSPACE}: ddpctl launch sends it as a ConfigMap, this file does not."
    if job.secrets:
        kubectl = shlex.join(Kubectl(context=options.context, namespace=options.namespace).argv)
        words = " ".join(f'"{name}=${name}"' for name in job.secrets)
        yield (
            f"First: printf '%s\\n' {words} | {kubectl} create secret generic {draft.name} --from-env-file=/dev/stdin"
        )
    yield from (f"Note: {line}." for line in (*_of_checkpoints(draft), *_of_pods(draft)))


def _needs(draft: Draft) -> Iterator[str]:
    """What must be in the cluster, and is not in the spec."""
    job, options, mounts = draft.plan.job, draft.options, mounts_of(draft.plan.job)
    yield f"the image {job.image}, where every machine can pull it"
    for mount in mounts:
        if mount.kind == "pvc":
            modes = "ReadOnlyMany or ReadWriteMany" if mount.read_only else "ReadWriteMany"
            mode = f", of a storage class that offers {modes}" if job.max_nodes > 1 else ""
            yield f"the PersistentVolumeClaim {mount.source} (at {mount.path}){mode}"
    secrets = [*options.image_pull_secrets, *(place.split("/", 1)[0] for place in options.env_secrets.values())]
    named = {
        "Secret": [*secrets, *(mount.source for mount in mounts if mount.kind == "secret")],
        "ConfigMap": [mount.source for mount in mounts if mount.kind == "configmap"],
        "PriorityClass": [options.priority_class] if options.priority_class else [],
        "queue": [options.queue] if options.queue else [],
    }
    for kind, names in named.items():
        yield from (f"the {kind} {name}" for name in dict.fromkeys(names))
    if options.gang:
        yield "a gang scheduler that the operator was started with (--gang-scheduler-name)"


def of_launch(draft: Draft, files: Mapping[str, str], left_out: Sequence[str]) -> Iterator[str]:
    """What was decided for the person who launches."""
    if files:
        size = sum(len(text.encode()) for text in files.values())
        goes = "goes" if len(files) == 1 else "go"
        yield f"{counted(len(files), 'file')} {goes} along, {-(-size // 1000)} kB: {_some(list(files))}"
    if left_out:
        yield (
            f"left out, since their names say that they hold secrets: {_some(left_out)} (one that the target's "
            "'project' names itself goes along)"
        )
    yield from (*_of_checkpoints(draft), *_of_pods(draft))


def _of_checkpoints(draft: Draft) -> Iterator[str]:
    if not holds(draft.plan.job, f"{RUNS}/{draft.name}"):
        yield f"checkpoints go with their pod: mounts [pvc=CLAIM:{RUNS}] keeps them"


def _of_pods(draft: Draft) -> Iterator[str]:
    job = draft.plan.job
    paths = [one_line(mount.source) for mount in mounts_of(job) if mount.kind == "path"]
    if paths and draft.options.profile == "restricted":
        yield (
            f"{', '.join(paths)} {'is a path' if len(paths) == 1 else 'are paths'} of each machine, which "
            "Pod Security restricted refuses: mount a claim (pvc=NAME), in a profile where other targets have a path"
        )
    if unlimited := [name for name, value in (("cpus", job.cpus), ("memory", job.memory)) if not value]:
        yield f"the pods have no limit of {' and '.join(unlimited)}: the job's {' and '.join(unlimited)} set one"


def _some(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    shown = ", ".join(one_line(name) for name in names[:MOST_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown
