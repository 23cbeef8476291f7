#!/usr/bin/env bash
# Most people expect a WebDataset to return the samples that TarWriter has written, each under its own __key__.
# What happens: the reader splits a name at the first dot behind the last slash, and takes neighbours with the same key
# for one sample. Samples with the keys sample0.1 and sample0.2 become one sample "sample0" with the fields 1.txt and
# 2.txt: the number of samples is wrong, and nothing is reported. TarWriter accepts such keys. Names of fields lose their
# upper case as well. A dot in a folder of the key is harmless.
# Version: webdataset 1.0.2.
# Source: found by a round trip; https://github.com/webdataset/webdataset defines the key as the part before the dot.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check webdataset==1.0.2
cd "$folder"
venv/bin/python - <<'END'
from importlib.metadata import version

import webdataset

print("webdataset", version("webdataset"))
with webdataset.TarWriter("samples.tar") as writer:
    for key in ("lr0.1/first", "sample0.1", "sample0.2", "last"):
        writer.write({"__key__": key, "txt": key, "PNG": b"image"})
read = {}
for sample in webdataset.WebDataset("samples.tar", shardshuffle=False):
    read[sample["__key__"]] = sorted(name for name in sample if not name.startswith("__"))
print("4 samples were written;", len(read), "are read:", read)
assert read == {
    "lr0.1/first": ["png", "txt"],
    "sample0": ["1.png", "1.txt", "2.png", "2.txt"],
    "last": ["png", "txt"],
}, read
END
