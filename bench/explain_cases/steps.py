"""A plain DistributedDataParallel script for bench/explain_cost.py: steps.py with|without|recorded STEPS FOLDER.

Writes the mean CPU time and the median wall time of a step, in seconds. The first steps are not counted.

With ``recorded``, each rank records itself for one second every 4 s, as it does for ``ddpctl profile``. The script then
also writes two medians for a step: the wall time, and the CPU time of the main thread. Each median has three values:
without a recording, during a recording, and while the trace is written.
"""

import json
import os
import statistics
import sys
import threading
import time
from bisect import bisect
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddprank.heartbeat import HEARTBEAT_FILE
from ddprun.ranks import process_groups, rank_server
from ddprun.ranks.rank_server import SOCKET_SUFFIX
from ddprun.system import compat

WARM_UP, EVERY_S = 50, 4.0
PHASES = ("outside", "recording", "writing")
way, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
if way == "without":
    process_groups.serve = lambda _: None
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 12 * 12, 10)
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
images, labels = torch.rand(32, 3, 16, 16), torch.randint(10, (32,))
times, cpu_times, began_at, cpu_s = [], [], [], 0.0
changes = [0.0]  # when the next of the phases began


def record_now_and_then() -> None:
    while True:
        time.sleep(EVERY_S - time.time() % EVERY_S)  # all ranks at the same time
        recording = rank_server.record(str(folder / f"trace-{dist.get_rank()}"), 1.0)
        changes.extend((recording["began"], recording["ended"], time.time()))


if way == "recorded":
    threading.Thread(target=record_now_and_then, daemon=True).start()
for number in range(WARM_UP + steps):
    if number == WARM_UP:
        cpu_s = time.process_time()
    began_at.append(time.time())
    began, cpu_began = time.perf_counter(), time.thread_time()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    times.append(time.perf_counter() - began)
    cpu_times.append(time.thread_time() - cpu_began)
cpu_s = (time.process_time() - cpu_s) / steps
entries = len(json.loads(compat.flight_recorder())["gloo"].get("entries", ()))
answers = Path(os.environ[HEARTBEAT_FILE] + SOCKET_SUFFIX).exists()
assert (entries > 0, answers) == (way != "without", way != "without"), (way, entries, answers)
seconds = {"cpu": cpu_s, "wall": statistics.median(times[WARM_UP:])}
if way == "recorded":
    done = [*changes]  # without a recording that still runs
    steps_of: dict[str, list[int]] = {phase: [] for phase in PHASES}
    for number in range(WARM_UP, bisect(began_at, done[-1])):
        steps_of[PHASES[(bisect(done, began_at[number]) - 1) % 3]].append(number)
    for name, values in (("cpu", cpu_times), ("wall", times)):
        medians = {phase: statistics.median(values[number] for number in steps_of[phase]) for phase in PHASES}
        seconds |= {f"{name} {phase}": median for phase, median in medians.items()}
(folder / f"{dist.get_rank()}.json").write_text(json.dumps(seconds))
dist.barrier()
dist.destroy_process_group()
