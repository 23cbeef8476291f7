"""Changes manifests by the options ``pod`` and ``manifests``, with the rules of Kubernetes' strategic merge patch.

Keys are merged, null deletes a key, and ``$patch: replace`` or ``$patch: delete`` replaces or deletes an object. The
items of a list in MERGE_KEYS are merged if they have the same key. Every other list is replaced.
Source: https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/ and the tags
patchMergeKey of https://github.com/kubernetes/api/blob/master/core/v1/types.go
"""

from collections.abc import Mapping
from typing import Any

from ddpctl.errors import ConfigError
from ddpctl.text import quote

Object = dict[str, Any]
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
