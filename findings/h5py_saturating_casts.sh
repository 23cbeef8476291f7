#!/usr/bin/env bash
# Most people expect `dataset[:] = array` to convert numbers as NumPy's astype does, because h5py speaks of NumPy dtypes
# throughout, and expect HDF5 and Zarr files that are written with the same line to hold the same numbers.
# What happens: HDF5 converts, not NumPy, and it clips. The int64 values 300, -5 and 256 become 255, 0 and 255 in a uint8
# dataset, where NumPy and Zarr wrap them to 44, 251 and 0. Reading clips too, through dataset.astype(...) and
# read_direct. So labels or tokens that do not fit become valid-looking maximums, and a test that compares with NumPy
# fails. Nothing warns.
# Version: h5py 3.16.0, zarr 3.1.6, NumPy 2.4.6.
# Source: https://docs.h5py.org/en/stable/high/dataset.html (astype); the rules are HDF5's own for overflows.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check h5py==3.16.0 zarr==3.1.6 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'END'
import h5py
import numpy as np
import zarr

print("h5py", h5py.__version__, "zarr", zarr.__version__, "NumPy", np.__version__)
values = np.array([300, -5, 255, 256])
wrapped = values.astype("uint8").tolist()
print("NumPy astype", wrapped)
array = zarr.create_array("labels.zarr", shape=(4,), dtype="uint8")
array[:] = values
print("zarr        ", array[:].tolist())
with h5py.File("labels.h5", "w") as file:
    narrow = file.create_dataset("narrow", (4,), dtype="uint8")
    narrow[:] = values
    file["wide"] = values
    direct = np.empty(4, "uint8")
    file["wide"].read_direct(direct)
    clipped = [narrow[:].tolist(), file["wide"].astype("uint8")[:].tolist(), direct.tolist()]
print("h5py: written, read with astype, read_direct", clipped)
assert wrapped == array[:].tolist() == [44, 251, 255, 0]
assert clipped == [[255, 0, 255, 255]] * 3
END
