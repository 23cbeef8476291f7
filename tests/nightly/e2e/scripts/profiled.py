"""Records itself from another thread, as ddpctl profile does, while its main thread profiles, forks and exits."""

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ddprun.ranks import rank_server

SECONDS = 60.0  # longer than the test waits: what ends a recording is the script
trace = Path("trace.json")
replies: list[dict] = []
layer, batch = torch.nn.Linear(16, 16), torch.ones(4, 16)


def compute() -> None:
    layer(batch).sum().backward()


def record(seconds: float) -> threading.Thread:
    recording = threading.Thread(target=lambda: replies.append(rank_server.record(str(trace), seconds)), daemon=True)
    recording.start()
    return recording


def recording_runs() -> None:
    while not torch.autograd.profiler._is_profiler_enabled:
        time.sleep(0.001)
    compute()


def own(name: str) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as session:
        compute()
        if name == "own_first":
            record(SECONDS).join()
    return [event.name for event in session.events()]


def recorded() -> list[object]:
    """Why there is no recording, or an empty string; and whether it has the operators."""
    trace_text = trace.read_text() if trace.exists() else "{}"
    trace.unlink(missing_ok=True)
    names = {event["name"] for event in json.loads(trace_text).get("traceEvents", ())}
    return [replies.pop().get("unknown", ""), "aten::linear" in names]


results = {}
assert "aten::linear" in own("own_first")
results["own_first"] = recorded()
recording = record(SECONDS)
recording_runs()
assert "aten::linear" in own("own_second")
recording.join()
results["own_second"] = recorded()
recording = record(SECONDS)
recording_runs()
child = os.fork()
if child == 0:
    compute()
    os._exit(torch.autograd.profiler._is_profiler_enabled)
assert os.waitpid(child, 0)[1] == 0
recording.join()
results["fork"] = recorded()
print(json.dumps(results), flush=True)
record(SECONDS)
recording_runs()
sys.exit(3)
