#!/usr/bin/env bash
# Most people expect a reader of JSON lines to return each key of each line, or to fail. Files of metrics have keys,
# such as val_loss, that come first after thousands of lines, and numbers that are whole at the beginning.
# What happens: Polars looks at the first 100 lines and DuckDB at the first 20480. A key that comes later is left out
# of the result, and nothing is reported. A number with decimals in a column that was whole before is an error in
# Polars. DuckDB rounds it to a whole number, so that a loss of 0.4 is 0. A test with a short file sees neither.
# pyarrow returns all of it. infer_schema_length=None and sample_size=-1 avoid it.
# Version: polars 2.1.0, duckdb 2.0.1, pyarrow 26.0.1.
# Source: found by experiment; the documentation of polars.read_ndjson tells how many lines are looked at, and not what
# becomes of the others.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check polars==2.1.0 duckdb==2.0.1 pyarrow==26.0.1
cd "$folder"
cat >readers.py <<'END'
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow
import pyarrow.json

READERS: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "polars": lambda path: polars.read_ndjson(path).to_dicts(),
    "polars, None": lambda path: polars.read_ndjson(path, infer_schema_length=None).to_dicts(),
    "duckdb": lambda path: duckdb.read_json(path).to_arrow_table().to_pylist(),
    "duckdb, -1": lambda path: duckdb.read_json(path, sample_size=-1).to_arrow_table().to_pylist(),
    "pyarrow": lambda path: pyarrow.json.read_json(path).to_pylist(),
}
print(f"polars {polars.__version__}, duckdb {duckdb.__version__}, pyarrow {pyarrow.__version__}")
for lines in (99, 100, 20479, 20480):
    for last in ({"loss": 2, "val_loss": 0.5}, {"loss": 0.4}):
        path = Path("metrics.jsonl")
        path.write_text("".join(json.dumps(line) + "\n" for line in [{"loss": 2}] * lines + [last]))
        for name, read in READERS.items():
            try:
                seen: object = read(str(path))[-1]
            except polars.exceptions.ComputeError as error:
                seen = f"ComputeError: {str(error).splitlines()[0]}"
            if seen != last:
                print(f"{last} after {lines} lines, {name}: {seen}")
END
venv/bin/python readers.py | tee seen
diff seen - <<'END'
polars 2.1.0, duckdb 2.0.1, pyarrow 26.0.1
{'loss': 2, 'val_loss': 0.5} after 100 lines, polars: {'loss': 2}
{'loss': 0.4} after 100 lines, polars: ComputeError: cannot parse '0.4' (f64) as Int64
{'loss': 2, 'val_loss': 0.5} after 20479 lines, polars: {'loss': 2}
{'loss': 0.4} after 20479 lines, polars: ComputeError: cannot parse '0.4' (f64) as Int64
{'loss': 2, 'val_loss': 0.5} after 20480 lines, polars: {'loss': 2}
{'loss': 2, 'val_loss': 0.5} after 20480 lines, duckdb: {'loss': 2}
{'loss': 0.4} after 20480 lines, polars: ComputeError: cannot parse '0.4' (f64) as Int64
{'loss': 0.4} after 20480 lines, duckdb: {'loss': 0}
END
