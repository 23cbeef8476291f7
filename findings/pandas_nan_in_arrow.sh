#!/usr/bin/env bash
# Most people expect a diverged loss of NaN to be NaN in the Parquet file of the run's history, and its mean to be NaN,
# whichever way the table was made.
# What happens: Arrow keeps NaN if the values come from a list or from a NumPy array, and stores null if they come from a
# pandas Series or DataFrame, also in `pa.table({"loss": series})`; `series.values` keeps it. Aggregates skip null and
# not NaN: the mean of 1, NaN, 3 is 2.0 after pandas, and nan otherwise. So a history that went through pandas shows a
# smooth mean where the training diverged.
# Version: pyarrow 26.0.1, pandas 3.1.1.
# Source: https://arrow.apache.org/docs/python/generated/pyarrow.array.html: from_pandas is true for pandas objects.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyarrow==26.0.1 pandas==3.1.1
cd "$folder"
venv/bin/python - <<'END'
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

print("pyarrow", pa.__version__, "pandas", pd.__version__)
losses = [1.0, float("nan"), 3.0]
series = pd.Series(losses)
pd.DataFrame({"loss": losses}).to_parquet("history.parquet")
columns = {
    "list": pa.table({"loss": losses})["loss"],
    "series.values": pa.table({"loss": series.values})["loss"],
    "series": pa.table({"loss": series})["loss"],
    "DataFrame.to_parquet": pq.read_table("history.parquet")["loss"],
}
seen = {name: (column.null_count, str(pc.mean(column))) for name, column in columns.items()}
for name, (nulls, mean) in seen.items():
    print(f"{name}: {nulls} null, mean {mean}")
assert list(seen.values()) == [(0, "nan"), (0, "nan"), (1, "2.0"), (1, "2.0")], seen
END
