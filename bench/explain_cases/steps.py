"""A plain DistributedDataParallel script for bench/explain_cost.py: steps.py with|without STEPS FOLDER.

Writes the CPU seconds of a step and the median of its wall time, after some steps that are not counted.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddprun import compat, process_groups
from ddprun.rank_server import SOCKET_SUFFIX
from ddpwire.heartbeat import HEARTBEAT_FILE

WARM_UP = 50
way, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
if way == "without":
    process_groups.serve = lambda _: None
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 12 * 12, 10)
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
images, labels = torch.rand(32, 3, 16, 16), torch.randint(10, (32,))
times, cpu_s = [], 0.0
for number in range(WARM_UP + steps):
    if number == WARM_UP:
        cpu_s = time.process_time()
    began = time.perf_counter()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    times.append(time.perf_counter() - began)
cpu_s = (time.process_time() - cpu_s) / steps
recorded = len(json.loads(compat.flight_recorder())["gloo"].get("entries", ()))
answers = Path(os.environ[HEARTBEAT_FILE] + SOCKET_SUFFIX).exists()
assert (recorded > 0, answers) == (way == "with", way == "with"), (way, recorded, answers)
found = {"cpu": cpu_s, "wall": statistics.median(times[WARM_UP:])}
(folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
