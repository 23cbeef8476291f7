#!/usr/bin/env bash
# Most people expect the methods of a WebDataset to be alike: either each returns a new pipeline, so that a training and a
# validation pipeline can share a beginning, or each changes the pipeline and returns it.
# What happens: the methods that add a stage (map, shuffle, batched, slice, to_tuple) return a copy. repeat(),
# with_epoch() and with_length() change the pipeline that they are called on. So `short = full.with_epoch(3)` limits full
# to 3 samples too, and `len()` appears on a dataset that had none.
# Version: webdataset 1.0.2.
# Source: found by experiment; webdataset/pipeline.py, where compose() copies and the three methods do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check webdataset==1.0.2
cd "$folder"
venv/bin/python -W ignore - <<'END'
from importlib.metadata import version

import webdataset

print("webdataset", version("webdataset"))
with webdataset.TarWriter("samples.tar") as writer:
    for number in range(5):
        writer.write({"__key__": str(number), "txt": "x"})
calls = {
    "map": lambda full: full.map(dict),
    "shuffle": lambda full: full.shuffle(10),
    "slice(3)": lambda full: full.slice(3),
    "to_tuple": lambda full: full.to_tuple("txt"),
    "repeat(2)": lambda full: full.repeat(2),
    "with_epoch(3)": lambda full: full.with_epoch(3),
    "with_length(9)": lambda full: full.with_length(9),
}
results = {}
for name, call in calls.items():
    full = webdataset.WebDataset("samples.tar", shardshuffle=False)
    derived = call(full)
    results[name] = (derived is full, sum(1 for _ in full))
    print(f"full.{name}: returns full itself: {derived is full}; full has {results[name][1]} samples afterwards")
assert results == {
    **dict.fromkeys(["map", "shuffle", "slice(3)", "to_tuple"], (False, 5)),
    "repeat(2)": (True, 10),
    "with_epoch(3)": (True, 3),
    "with_length(9)": (True, 5),
}, results
END
