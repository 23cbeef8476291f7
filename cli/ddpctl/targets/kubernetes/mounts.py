"""A job's mounts as Kubernetes' volumes: paths of the machine, claims, Secrets and ConfigMaps. Pure."""

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from ddpctl.spec import JobSpec
from ddpctl.targets.kubernetes.options import is_object_name

RUNS = "/runs"  # the run's folder is in it
WORKSPACE = "/workspace"
Kind = Literal["pvc", "secret", "configmap", "path"]
KINDS: dict[Kind, str] = {"pvc": "claim", "secret": "Secret", "configmap": "ConfigMap", "path": "path"}


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One entry of a job's mounts."""

    kind: Kind
    source: str
    path: str
    read_only: bool


def mounts_of(job: JobSpec) -> tuple[Mount, ...]:
    """The job's mounts; their words are checked by ``JobSpec`` and the refusals."""
    mounts = []
    for text in job.mounts:
        source, path, *rest = text.split(":")
        word, equals, name = source.partition("=")
        kinds: dict[str, Kind] = {"pvc": "pvc", "secret": "secret", "configmap": "configmap"}
        kind: Kind = kinds.get(word, "path") if equals else "path"
        mounts.append(
            Mount(
                kind=kind,
                source=source if kind == "path" else name,
                path=str(PurePosixPath(path)),
                read_only=bool(rest) or kind in ("secret", "configmap"),
            )
        )
    return tuple(mounts)


def is_claim(name: str) -> bool:
    """Whether a claim, a Secret or a ConfigMap may be called so."""
    return is_object_name(name)


def holds(job: JobSpec, path: str) -> Mount | None:
    """The mount that what is written to ``path`` goes to; the deepest of them."""
    found = [mount for mount in mounts_of(job) if PurePosixPath(path).is_relative_to(mount.path)]
    return max(found, key=lambda mount: len(PurePosixPath(mount.path).parts), default=None)


def volume(name: str, mount: Mount) -> dict[str, Any]:
    """The volume of a mount."""
    sources: dict[Kind, dict[str, Any]] = {
        "pvc": {"persistentVolumeClaim": {"claimName": mount.source}},
        "secret": {"secret": {"secretName": mount.source, "defaultMode": 0o440}},
        "configmap": {"configMap": {"name": mount.source}},
        "path": {"hostPath": {"path": mount.source}},
    }
    return {"name": name, **sources[mount.kind]}


def place(name: str, mount: Mount) -> dict[str, Any]:
    """Where the container has it."""
    return {"name": name, "mountPath": mount.path, **({"readOnly": True} if mount.read_only else {})}
