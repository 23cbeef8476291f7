#!/usr/bin/env bash
# Most people expect `"b" in group` to be true after `group.create_array("b", ...)` has succeeded on the same group.
# What happens: once somebody has called consolidate_metadata on a group, each later open_group reads the copy, also when
# it opens for writing. create_array then writes the array, but the writer does not find it: `"b" in group` is False,
# group["b"] is a KeyError. Others do not either. An array that has grown keeps its old shape for who comes through the
# group, so the new samples are invisible; opened by its own path, it has them. Attributes of the group are fresh.
# open_group(..., use_consolidated=False), or consolidating after each change, avoids it.
# Version: zarr 3.1.6.
# Source: found by experiment; https://zarr.readthedocs.io/en/stable/user-guide/consolidated_metadata/ says that it is for
# data that does not change, and not that writers use the copy.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check zarr==3.1.6 numpy==2.4.6
cd "$folder"
venv/bin/python -W ignore - <<'END'
import numpy as np
import zarr

print("zarr", zarr.__version__)
zarr.open_group("data.zarr").create_array("a", data=np.arange(2))
zarr.consolidate_metadata("data.zarr")

writer = zarr.open_group("data.zarr")
writer.create_array("b", data=np.arange(3))
writer.attrs["epoch"] = 2
zarr.open_array("data.zarr/a").append(np.arange(5))

reader = zarr.open_group("data.zarr", mode="r")
fresh = zarr.open_group("data.zarr", mode="r", use_consolidated=False)
seen = {
    "b in the writer's own group": "b" in writer,
    "b in a group that is opened now": "b" in reader,
    "b in a group without the copy": "b" in fresh,
    "shape of a through the group": reader["a"].shape,
    "shape of a by its path": zarr.open_array("data.zarr/a", mode="r").shape,
    "attributes": dict(reader.attrs),
}
for name, value in seen.items():
    print(f"{name}: {value}")
assert list(seen.values()) == [False, False, True, (2,), (7,), {"epoch": 2}]
END
