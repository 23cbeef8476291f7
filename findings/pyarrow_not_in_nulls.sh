#!/usr/bin/env bash
# Most people expect the two spellings `("host", "!=", "a")` and `("host", "not in", ["a"])` of a Parquet filter to
# select the same rows, as they do in SQL, where a row whose host is NULL passes neither.
# What happens: "!=" drops the rows without a host, and "not in" returns them. The reason is that a comparison with null
# is null, while is_in answers false for null, and "not in" inverts that. pandas.read_parquet(filters=...) passes the
# filters on, so it differs in the same way. Rows with NaN pass both.
# Version: pyarrow 26.0.1, pandas 3.1.1.
# Source: found by experiment; https://arrow.apache.org/docs/python/generated/pyarrow.parquet.read_table.html lists both
# operators and says nothing of nulls in "not in".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyarrow==26.0.1 pandas==3.1.1
cd "$folder"
venv/bin/python - <<'END'
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

print("pyarrow", pa.__version__, "pandas", pd.__version__)
pq.write_table(pa.table({"host": ["a", "b", None], "step": [1, 2, 3]}), "runs.parquet")
unequal, not_in = [("host", "!=", "a")], [("host", "not in", ["a"])]
steps = [pq.read_table("runs.parquet", filters=filters)["step"].to_pylist() for filters in (unequal, not_in)]
print(f'steps of host != "a": {steps[0]}, of host not in ["a"]: {steps[1]}')
frames = [pd.read_parquet("runs.parquet", filters=filters)["step"].tolist() for filters in (unequal, not_in)]
print("the same with pandas:", *frames)
assert steps == frames == [[2], [2, 3]]
END
