#!/usr/bin/env bash
# Most people expect the batch that a DataLoader makes of some samples to have the same type and keys in whatever order
# a shuffle has put them.
# What happens: default_collate takes the type and the keys from the first sample. Python numbers (of a JSON file in
# which some are written as 1 and some as 0.5) are float32 if the first is an int, and float64 if it is a float:
# 16777217 survives in one order and becomes 16777216 in the other. A key that the first sample lacks is dropped, and
# one that only the first has is a KeyError. So with another seed, a training fails, loses a field or has another
# precision.
# Version: torch 2.15.0, CPU.
# Source: found by experiment; torch/utils/data/_utils/collate.py, whose documentation has `float` -> Tensor without a
# dtype.
# An optional FINDINGS_VENV names a Python with this torch, to skip the download of 5 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [[ -z ${FINDINGS_VENV:-} ]]; then
  python3 -m venv "$folder/venv"
  "$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.15.0 numpy==2.4.6
fi
cat >"$folder/batches.py" <<'END'
import json

import torch
from torch.utils.data import DataLoader

print("torch", torch.__version__.partition("+")[0])
for lines in (['{"y": 16777217}', '{"y": 0.5}'], ['{"y": 1}', '{"y": 2, "weight": 0.1}']):
    for order in (lines, lines[::-1]):
        try:
            (batch,) = DataLoader([json.loads(line) for line in order], batch_size=2)
            seen = ", ".join(f"{key}: {values.tolist()} {values.dtype}" for key, values in batch.items())
        except KeyError as error:
            seen = f"KeyError: {str(error).splitlines()[-1].rpartition(' ')[2]}"
        print(" then ".join(order), "->", seen)
END
"${FINDINGS_VENV:-$folder/venv/bin/python}" "$folder/batches.py" | tee "$folder/seen"
diff "$folder/seen" - <<'END'
torch 2.15.0
{"y": 16777217} then {"y": 0.5} -> y: [16777216.0, 0.5] torch.float32
{"y": 0.5} then {"y": 16777217} -> y: [0.5, 16777217.0] torch.float64
{"y": 1} then {"y": 2, "weight": 0.1} -> y: [1, 2] torch.int64
{"y": 2, "weight": 0.1} then {"y": 1} -> KeyError: 'weight'
END
