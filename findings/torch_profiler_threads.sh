#!/usr/bin/env bash
# Most people expect torch.profiler to record the operators of all threads of the process while it runs, as its traces
# have a row for each thread.
# What happens: on the CPU it records the thread that has started it. The operators of any other Python thread are
# missing, also if that thread starts inside of the `with` block, and nothing says so: a training that runs in another
# thread (a server's, a notebook's) gives an empty trace. A private class tells it to record them:
# experimental_config=_ExperimentalConfig(profile_all_threads=True).
# Version: torch 2.15.0, CPU.
# Source: met when a profile was started from a helper thread; torch/csrc/autograd/profiler_kineto.cpp.
# An optional FINDINGS_VENV names a Python with this torch, to skip the download of 5 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [[ -z ${FINDINGS_VENV:-} ]]; then
  python3 -m venv "$folder/venv"
  "$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.15.0 numpy==2.4.6
fi
cat >"$folder/threads.py" <<'END'
import threading

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile


def work() -> None:
    for _ in range(5):
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))


def recorded(**options: object) -> int:
    """Record 5 products in this thread and 5 in another; return how many are in the profile."""
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        work()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    return sum(event.key == "aten::mm" for event in profiler.events())


results = recorded(), recorded(experimental_config=_ExperimentalConfig(profile_all_threads=True))
print(f"torch {torch.__version__}: of 10 products, {results[0]} are recorded; with profile_all_threads {results[1]}")
assert results == (5, 10), results
END
"${FINDINGS_VENV:-$folder/venv/bin/python}" "$folder/threads.py" 2>/dev/null
