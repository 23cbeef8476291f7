#!/usr/bin/env bash
# Most people expect submitit's local executor to run a job in the environment of the shell, as it does for every other
# variable: with CUDA_VISIBLE_DEVICES=2,3 in the shell, a job with one GPU gets one of these two.
# What happens: the executor sets CUDA_VISIBLE_DEVICES to the numbers from 0 up to gpus_per_node, whatever the shell has.
# The job runs on GPU 0, which the shell had excluded. Without gpus_per_node the variable is empty, so torch sees no GPU.
# The parameter visible_gpus of LocalExecutor chooses them. DebugExecutor, for the same function, does not touch the variable.
# Version: submitit 1.5.4, cloudpickle 3.1.2.
# Source: found by experiment; submitit/local/local.py. No GPU is needed to see it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check submitit==1.5.4 cloudpickle==3.1.2
cd "$folder"
cat >jobs.py <<'END'
import os

import submitit


def devices() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


if __name__ == "__main__":
    print("submitit", submitit.__version__, "with CUDA_VISIBLE_DEVICES=2,3")
    results = {}
    for gpus in (None, 1, 2):
        executor = submitit.AutoExecutor(folder="log", cluster="local")
        executor.update_parameters(timeout_min=2, **({} if gpus is None else {"gpus_per_node": gpus}))
        results[f"gpus_per_node={gpus}"] = executor.submit(devices).result()
    results["DebugExecutor"] = submitit.DebugExecutor("log").submit(devices).result()
    print(results)
    assert results == {
        "gpus_per_node=None": "", "gpus_per_node=1": "0", "gpus_per_node=2": "0,1", "DebugExecutor": "2,3",
    }
END
CUDA_VISIBLE_DEVICES=2,3 venv/bin/python jobs.py
