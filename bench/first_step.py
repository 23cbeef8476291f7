"""Train on random data with DDP. After its first step, each rank writes the file DIR/ATTEMPT.RANK and continues."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddprank.heartbeat import HEARTBEAT_FILE, Heart

folder, steps, device = Path(sys.argv[1]), int(sys.argv[2]), torch.device(*sys.argv[3:] or ["cpu"])
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
heart = Heart(os.environ.get(HEARTBEAT_FILE))  # torchrun sets none
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(steps):
    model(torch.randn(8, 64, device=device)).square().mean().backward()
    optimizer.step()
    heart.beat(int(1000 * time.monotonic()))  # always further: ddprun gives up where there is no progress
    if step == 0:
        if device.type == "cuda":
            torch.cuda.synchronize()
        record = folder / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}"
        part = record.with_name(f"{record.name}.part")
        part.write_text(f"{time.time()} {os.getpid()}")
        part.rename(record)
    else:
        time.sleep(0.02)
dist.destroy_process_group()
