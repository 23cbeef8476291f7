"""Changes manifests by the options ``pod`` and ``manifests``, with the rules of Kubernetes' strategic merge patch.

Keys are merged, null deletes a key, and ``$patch: replace`` or ``$patch: delete`` replaces or deletes an object. The
items of a list in MERGE_KEYS are merged if they have the same key. Every other list is replaced.
Source: https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/ and the tags
patchMergeKey of https://github.com/kubernetes/api/blob/master/core/v1/types.go

The option ``runtime`` is the reverse: a runtime of the cluster is the base of a run's own TrainingRuntime, and ddpctl's
fields are merged over those of the runtime. Tolerations add up.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ddpctl.errors import ConfigError
from ddpctl.text import quote

Object = dict[str, Any]
Spec = Mapping[str, Any]  # the spec of a TrainingRuntime or ClusterTrainingRuntime
NODE = "node"  # the name that Trainer requires of the job and of the container of the ranks
MAIN = "main"  # how a patch names the container of the ranks, whose name depends on the kind of workload
MERGE_KEYS = {
    "containers": "name", "initContainers": "name", "ephemeralContainers": "name", "volumes": "name", "env": "name",
    "imagePullSecrets": "name", "resourceClaims": "name", "schedulingGates": "name", "ports": "containerPort",
    "volumeMounts": "mountPath", "volumeDevices": "devicePath", "topologySpreadConstraints": "topologyKey",
    "hostAliases": "ip",
}  # fmt: skip
_DIRECTIVE = "$patch"
# The kinds that the option manifests may change, and the fields of their specs to which it may not even add anything.
KINDS = {
    "PyTorchJob": ("elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs"),
    "TrainJob": ("runtimeRef", "trainer"),
    "TrainingRuntime": ("mlPolicy",),
    "Job": ("template",),
}


def merge(value: Object, patch: Mapping[str, Any]) -> Object:
    """Return the object with the changes of a patch. Raises ConfigError."""
    if unknown := [key for key in patch if key.startswith("$") and key != _DIRECTIVE]:
        raise ConfigError(f"patch: the directive {quote(unknown[0])} is not supported, only {_DIRECTIVE}")
    directive = patch.get(_DIRECTIVE)
    if directive not in (None, "merge", "replace", "delete"):
        raise ConfigError(f"patch: {_DIRECTIVE}: {quote(directive)} is not one of merge, replace, delete")
    result = {} if directive in ("replace", "delete") else dict(value)
    for key, item in patch.items() if directive != "delete" else ():
        if item is None:
            result.pop(key, None)
        elif (key in MERGE_KEYS or isinstance(result.get(key), list)) and not isinstance(item, list):
            raise ConfigError(f"patch: {quote(key)} takes a list")
        elif isinstance(result.get(key), dict) and not isinstance(item, Mapping):
            raise ConfigError(f"patch: {quote(key)} takes keys and values")
        elif isinstance(item, Mapping):
            result[key] = merge(result.get(key) or {}, item)
        elif key in MERGE_KEYS:
            result[key] = _merge_list(result.get(key) or [], item, key)
        elif key != _DIRECTIVE:
            result[key] = item
    return result


def _merge_list(items: list[Object], patch: list[Any], name: str) -> list[Object]:
    key = MERGE_KEYS[name]
    if any(item.get(_DIRECTIVE) == "replace" and len(item) == 1 for item in patch if isinstance(item, Mapping)):
        items, patch = [], [item for item in patch if item != {_DIRECTIVE: "replace"}]
    if any(not isinstance(item, Mapping) or key not in item for item in patch):
        raise ConfigError(f"patch: each entry of {name} needs the key {quote(key)}")
    order = [item[key] for item in items]
    deleted = {item[key] for item in patch if item.get(_DIRECTIVE) == "delete"}
    changes = {item[key]: item for item in patch if item[key] not in deleted}
    present = {item[key]: item for item in items if item[key] not in deleted}
    unchanged = [item for item in present.values() if item[key] not in changes]
    result = []
    for change in changes.values():  # a changed item keeps its place, and a new item comes before the next one
        place = order.index(change[key]) if change[key] in order else -1
        while unchanged and order.index(unchanged[0][key]) < place:
            result.append(unchanged.pop(0))
        result.append(merge(present.get(change[key], {}), change))
    return result + unchanged


def apply(template: Object, patch: Mapping[str, Any], container: str, *, fixed: tuple[str, ...]) -> Object:
    """Return the pod template with the changes of a patch.

    ``fixed``: resources whose limits may not change. Raises ConfigError if the patch changes what ddprun depends on.
    """
    spec = patch.get("spec")
    if isinstance(spec, Mapping) and isinstance(spec.get("containers"), list):
        named = [
            {**entry, "name": container} if isinstance(entry, Mapping) and entry.get("name") == MAIN else entry
            for entry in spec["containers"]
        ]
        patch = {**patch, "spec": {**spec, "containers": named}}
    if unknown := patch.keys() - {"metadata", "spec"}:
        raise ConfigError(f"pod: {quote(min(unknown))} is not a part of a pod template: expected metadata and spec")
    result = merge(template, patch)
    before, after = (_contract(item, container, fixed) for item in (template, result))
    if changed := [place for place in before if after.get(place) != before[place]]:
        raise ConfigError(f"pod: ddpctl sets {', '.join(changed)}: leave it out")
    return result


def extend(manifest: Object, patches: Mapping[str, Any]) -> Object:
    """Return a manifest with the additions of the patch for its kind. Raises ConfigError if it changes a value."""
    kind, spec = manifest["kind"], manifest["spec"]
    result = merge(manifest, patches.get(kind, {}))
    same = all(spec.get(key) == result.get("spec", {}).get(key) for key in KINDS[kind])
    if not same or merge(result, manifest) != result:
        fixed = ", ".join(KINDS[kind])
        raise ConfigError(f"manifests: a patch of {kind} may only add to what ddpctl sets, and not to its {fixed}")
    return result


def _contract(template: Object, container: str, fixed: tuple[str, ...]) -> dict[str, Any]:
    """Return the values that a patch may not change, keyed by their places."""
    spec = template.get("spec", {})
    main: Object = next((item for item in spec.get("containers", ()) if item["name"] == container), {})
    limits = main.get("resources", {}).get("limits", {})
    fields = ("restartPolicy", "hostname", "subdomain", "terminationGracePeriodSeconds")
    return {
        **{f"the label {name}": value for name, value in template.get("metadata", {}).get("labels", {}).items()},
        **{name: spec.get(name) for name in fields},
        **{f"{name} of {MAIN}": main.get(name) for name in ("image", "command", "args", "workingDir")},
        **{f"the variable {entry['name']}": entry for entry in main.get("env", ())},
        **{f"the port {entry.get('name')}": entry for entry in main.get("ports", ())},
        **{f"the mount {entry['mountPath']}": entry for entry in main.get("volumeMounts", ())},
        **{f"the limit of {name}": limits.get(name) for name in fixed},
    }


# The runtime of a cluster


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
