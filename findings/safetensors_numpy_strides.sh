#!/usr/bin/env bash
# Most people expect safetensors.numpy.save_file to write the values of an array, or to refuse an array that is not
# contiguous, as safetensors.torch.save_file does.
# What happens: it writes the array's memory in the order in which it lies there, under the array's shape. A transposed
# or strided array is stored with other values, and nothing is reported. The file is valid; load_file returns the
# wrong values. np.ascontiguousarray(array) before the call avoids it.
# Version: safetensors 0.8.0, numpy 2.4.6.
# Source: found by a round trip; https://github.com/huggingface/safetensors/blob/main/bindings/python/py_src/safetensors/numpy.py
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'END'
import numpy as np
import safetensors
from safetensors.numpy import load, load_file, save, save_file

print("safetensors", safetensors.__version__, "numpy", np.__version__)
weights = np.arange(6, dtype=np.float32).reshape(2, 3)
arrays = {"contiguous": weights, "transposed": weights.T, "every other column": weights[:, ::2]}
save_file(arrays, "weights.safetensors")
loaded, from_bytes = load_file("weights.safetensors"), load(save(arrays))
same = {}
for name, array in arrays.items():
    same[name] = np.array_equal(loaded[name], array)
    print(f"{name}: saved {array.tolist()}, loaded {loaded[name].tolist()}")
    assert np.array_equal(loaded[name], from_bytes[name], equal_nan=True)
assert same == {"contiguous": True, "transposed": False, "every other column": False}, same
END
