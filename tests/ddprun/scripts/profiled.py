"""Records itself from another thread, as ddpctl profile does, while its main thread does what argv[1] says."""

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ddprun import rank_profiler

SECONDS = 60.0  # longer than the test waits: what ends a recording is the script
trace = Path("trace.json")
replies: list[dict] = []
layer, batch = torch.nn.Linear(16, 16), torch.ones(4, 16)


def compute() -> None:
    layer(batch).sum().backward()


def record(seconds: float) -> threading.Thread:
    recording = threading.Thread(target=lambda: replies.append(rank_profiler.record(str(trace), seconds)), daemon=True)
    recording.start()
    return recording


def recording_runs() -> None:
    while not torch.autograd.profiler._is_profiler_enabled:
        time.sleep(0.001)
    compute()


def own(name: str) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        compute()
        if name == "own_first":
            record(SECONDS).join()
    return [event.name for event in found.events()]


if sys.argv[1] == "own_first":
    assert "aten::linear" in own("own_first")
    record(0.1).join()  # when the script's profiler has ended, there can be another one
elif sys.argv[1] == "own_second":
    recording = record(SECONDS)
    recording_runs()
    assert "aten::linear" in own("own_second")
    recording.join()
elif sys.argv[1] == "fork":
    recording = record(SECONDS)
    recording_runs()
    child = os.fork()
    if child == 0:
        compute()
        os._exit(torch.autograd.profiler._is_profiler_enabled)
    assert os.waitpid(child, 0)[1] == 0
    recording.join()
elif sys.argv[1] == "exit":
    record(SECONDS)
    recording_runs()
    sys.exit(3)
names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]} if trace.exists() else set()
print(json.dumps({"unknown": [reply.get("unknown", "") for reply in replies], "linear": "aten::linear" in names}))
