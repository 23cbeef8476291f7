"""Takes a runtime of the cluster as the base of a run's own TrainingRuntime (the option ``runtime``).

ddpctl's fields are merged over those of the runtime, as a strategic merge patch. Tolerations add up.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ddpctl.errors import ConfigError
from ddpctl.targets.kubernetes.pod_patch import Object, merge

Spec = Mapping[str, Any]  # the spec of a TrainingRuntime or ClusterTrainingRuntime
NODE = "node"  # the name that Trainer requires of the job and of the container of the ranks


def check_runtime(name: str, spec: Spec) -> None:
    """Check that a run can have this runtime as its base. Raises ConfigError."""
    jobs = spec["template"]["spec"].get("replicatedJobs", [])
    wrong = [f"mlPolicy.{policy}" for policy in spec.get("mlPolicy", {}) if policy not in ("numNodes", "torch")]
    wrong += [f"replicatedJobs.{job['name']}" for job in jobs if job["name"] != NODE]
    wrong += ["failurePolicy"] if spec["template"]["spec"].get("failurePolicy") else []
    if wrong or not jobs:
        needed = f"a runtime for torch whose only replicated job is '{NODE}', without a failurePolicy"
        raise ConfigError(f"runtime: {name} sets {', '.join(wrong) or 'no replicatedJobs'}, but a run needs {needed}")


def replicated_job(spec: Spec) -> Object:
    """Return the only replicated job of a checked runtime, or an empty one if there is no runtime."""
    return dict(spec["template"]["spec"]["replicatedJobs"][0]) if spec else {}


def on_runtime(spec: Spec, own: Object, defaults: tuple[str, ...], gpu: str) -> Object:
    """Return the pod template ``own`` with the fields of the runtime's pod template that it does not set.

    ``defaults``: resources that ``own`` requests only if the runtime does not. ``gpu``: the resource of GPUs.
    Raises ConfigError for fields that contradict those of ``own``.
    """
    if not spec:
        return own
    base = replicated_job(spec)["template"]["spec"]["template"]
    theirs, ours, main = base.get("spec", {}), own["spec"], own["spec"]["containers"][0]
    node: Object = next((item for item in theirs.get("containers", ()) if item["name"] == NODE), {})
    if wrong := list(_contradictions(theirs, node, ours, gpu)):
        raise ConfigError(f"runtime: ddpctl sets {', '.join(wrong)} otherwise than the cluster's runtime: use another")
    resources = node.get("resources", {})
    set_there = {name for part in ("requests", "limits") for name in resources.get(part, ()) if name in defaults}
    requests = {name: value for name, value in main["resources"]["requests"].items() if name not in set_there}
    main = {**main, "resources": {**main["resources"], "requests": requests}}
    tolerations = [item for item in theirs.get("tolerations", ()) if item not in ours["tolerations"]]
    changed = {"containers": [main], "tolerations": tolerations + ours["tolerations"]}
    return merge(base, {**own, "spec": {**ours, **changed}})


def _contradictions(theirs: Object, node: Object, ours: Object, gpu: str) -> Iterator[str]:
    main = ours["containers"][0]
    volumes = {item["name"]: item for item in ours["volumes"]}
    mounts = {item["mountPath"]: item["name"] for item in main["volumeMounts"] if item["name"] in ("runs", "project")}
    yield from (name for name in ("hostname", "subdomain") if name in theirs)
    if not node:
        yield f"the container '{NODE}'"
    for item in node.get("volumeMounts", ()):
        if item["mountPath"] in mounts:
            yield f"the mount {item['mountPath']}"
    for item in theirs.get("volumes", ()):
        if item["name"] in volumes and item.keys() != volumes[item["name"]].keys():
            yield f"the volume {item['name']}"
    if gpu in node.get("resources", {}).get("limits", {}) and gpu not in main["resources"]["limits"]:
        yield f"the limit of {gpu}"
