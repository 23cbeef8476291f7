"""One of three ranks on two nodes, of which the first has two ranks: its variables, and sums over all ranks."""

import os
from datetime import timedelta

import facts
import torch
import torch.distributed as dist
from facts import fact

NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip
for name in NAMES:
    fact(name, lambda name=name: os.environ.get(name))
dist.init_process_group("gloo", timeout=timedelta(seconds=200))
ones = torch.tensor([dist.get_rank() + 1.0])
fact("world size after init_process_group with env://", dist.get_world_size)
fact("gloo all_reduce", lambda: (dist.all_reduce(ones), float(ones))[1])
facts.save()
dist.barrier()
dist.destroy_process_group()
