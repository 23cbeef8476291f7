#!/usr/bin/env bash
# Most people expect the models of the Python client of Kubernetes to be plain containers: what is in them is sent, and
# the API server judges it. A limit of {"nvidia.com/gpu": 1} with a number is valid in a manifest.
# What happens: since version 37, the models are pydantic models with strict types that refuse unknown names. The number
# 1 as a limit or as the value of a variable is a ValidationError in the constructor, and in a later assignment.
# from_dict() is the opposite of the constructor: it drops a key that it does not know, such as a misspelt one, without a
# word.
# Version: kubernetes 37.0.2; version 36.0.3 accepts the numbers.
# Source: found by experiment; Quantity in the API accepts numbers (apimachinery, pkg/api/resource).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cat >"$folder/models.py" <<'END'
from importlib.metadata import version

from kubernetes import client


def result(call):
    try:
        return client.ApiClient().sanitize_for_serialization(call())
    except Exception as error:
        return type(error).__name__


print("kubernetes", version("kubernetes"))
results = {
    "limit 1": result(lambda: client.V1ResourceRequirements(limits={"nvidia.com/gpu": 1})),
    "limit '1'": result(lambda: client.V1ResourceRequirements(limits={"nvidia.com/gpu": "1"})),
    "variable 1": result(lambda: client.V1EnvVar(name="RANKS", value=1)),
    "unknown name": result(lambda: client.V1Container(name="train", imag="x")),
}
if hasattr(client.V1Container, "from_dict"):
    results["unknown key, from_dict"] = result(lambda: client.V1Container.from_dict({"name": "train", "imag": "x"}))
for name, value in results.items():
    print(f"  {name}: {value}")
expected = {"limit 1": "ValidationError", "variable 1": "ValidationError", "unknown name": "ValidationError"}
if version("kubernetes") < "37":
    expected = {"limit 1": {"limits": {"nvidia.com/gpu": 1}}, "variable 1": {"name": "RANKS", "value": 1}, "unknown name": "TypeError"}
else:
    expected["unknown key, from_dict"] = {"name": "train"}
assert results == expected | {"limit '1'": {"limits": {"nvidia.com/gpu": "1"}}}, results
END
for version in 36.0.3 37.0.2; do
  "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "kubernetes==$version"
  "$folder/venv/bin/python" "$folder/models.py"
done
