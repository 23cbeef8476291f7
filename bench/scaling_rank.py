"""A rank of bench/scaling.py: runs ddptrain's steps without evaluations and checkpoints, and prints images/s.

python bench/scaling_rank.py STEPS OPTIONS_OF_DDPTRAIN...
"""

import os
import sys
import time

import torch.distributed as dist

from ddptrain.callbacks import NonFiniteGuard
from ddptrain.config import parse_options
from ddptrain.data.datasets import SOURCES
from ddptrain.data.sampling import batches, epoch_order, shard_of
from ddptrain.distributed import join_ranks, make_world, read_rank_info, set_up_torch
from ddptrain.step_timing import measure_phases
from ddptrain.train_loop import train_step
from ddptrain.training_state import build_training_state

WARM_UP = 2

steps, options = int(sys.argv[1]), parse_options(sys.argv[2:], os.environ)
rank_info = read_rank_info(os.environ, options.ranks)
set_up_torch(rank_info, os.environ, deterministic=False)
join_ranks(rank_info, options.ranks)
world = make_world(rank_info, options.machine.device, options.ranks)
size = options.training.batch_size
state = build_training_state(options, world, SOURCES["synthetic"].load(options.data, 0), batch_size=size)
guard, phases = (
    NonFiniteGuard(world.device),
    measure_phases(world.device, state.model.parameters(), alone=rank_info.size == 1),
)
order = epoch_order(len(state.data.train), seed=0, epoch=0).to(world.device)
for step, batch in enumerate(batches(order, size, first=0)):
    if step == WARM_UP:
        began = time.monotonic()
    shard = shard_of(batch, rank=rank_info.rank, shares=(1,) * rank_info.size)
    phases.begin()
    loss = train_step(state, shard, step=step + 1, epoch=0, lr=0.01, phases=phases, guard=guard)
    phases.end(step + 1)
    if step == WARM_UP + steps - 1:
        break
float(loss)  # wait for the device
print(f"{steps * size / (time.monotonic() - began):.3f}", flush=True)
if rank_info.size > 1:
    dist.barrier()
os._exit(0)
