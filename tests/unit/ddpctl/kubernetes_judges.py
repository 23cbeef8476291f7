"""Checks of a manifest without a cluster: the CRDs' own schemas, the core kinds' schemas, Pod Security restricted.

The API server decodes strictly, so an unknown field is a fault here too. A check returns a line for each fault.
"""

import json
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate.utils as core
from tests.unit.ddpctl.kubernetes_lab import DATA

core.schema_contents = cache(core.schema_contents)  # else 2 MB are read again for each object
Object = dict[str, Any]

CRDS = {
    "PyTorchJob": ("pytorchjobs-v1.8.1", "pytorchjobs-v1.9", "pytorchjobs-v1.9.4"),
    "TrainJob": ("trainer-v2.3.0-trainjobs", "trainer-8c0f505-trainjobs"),
    "TrainingRuntime": ("trainer-v2.3.0-trainingruntimes", "trainer-8c0f505-trainingruntimes"),
}
VERSIONS = tuple(f"1.{minor}" for minor in range(28, 37))
# https://kubernetes.io/docs/concepts/security/pod-security-standards/ of 1.32
_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def faults(thing: Object, versions: tuple[str, ...] = VERSIONS) -> list[str]:
    """The faults that the schemas of these versions find."""
    if thing["kind"] in CRDS:
        errors = [(crd, error) for crd in CRDS[thing["kind"]] for error in _crd(crd).iter_errors(thing)]
        return [f"{crd}: {'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for crd, error in errors]
    lines = []
    for version in versions:
        try:
            core.validate(thing, version, strict=True)
        except core.ValidationError as error:
            lines.append(f"{version}: {error}")
    return lines


@cache
def _crd(name: str) -> Any:
    schema = json.loads((DATA / "crds" / f"{name}.json").read_text())
    _close(schema)
    return jsonschema.Draft202012Validator(schema)


def _close(schema: Any) -> None:
    """Strict decoding: a structural schema that names properties has no others."""
    if isinstance(schema, dict):
        if "properties" in schema and isinstance(schema["properties"], dict):
            if not schema.get("x-kubernetes-preserve-unknown-fields"):
                schema.setdefault("additionalProperties", False)
            for part in schema["properties"].values():
                _close(part)
        for key in ("items", "additionalProperties"):
            _close(schema.get(key))


def restricted(pod: Object) -> list[str]:
    """The violations of Pod Security *restricted* in a Pod."""
    spec = pod["spec"]
    whole = spec.get("securityContext", {})
    violations = [f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    for volume in spec.get("volumes", ()):
        violations += [f"volume {volume['name']} is a {kind}" for kind in volume.keys() - {"name"} - _VOLUMES]
    if whole.get("sysctls"):
        violations.append("sysctls are set")
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        violations += [f"{container['name']}: {line}" for line in _container(container, whole)]
    return violations


def _container(container: Object, whole: Object) -> list[str]:
    own = container.get("securityContext", {})
    both = {**whole, **own}
    capabilities = own.get("capabilities", {})
    wrong = {
        "privileged": bool(own.get("privileged")),
        "allowPrivilegeEscalation != false": own.get("allowPrivilegeEscalation") is not False,
        "unrestricted capabilities": "ALL" not in capabilities.get("drop", ())
        or bool(set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}),
        "runAsNonRoot != true": both.get("runAsNonRoot") is not True,
        "runAsUser=0": both.get("runAsUser") == 0,
        "seccompProfile": both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"),
        "procMount": own.get("procMount", "Default") != "Default",
        "hostPort": any(port.get("hostPort") for port in container.get("ports", ())),
    }
    return [violation for violation, is_so in wrong.items() if is_so]
