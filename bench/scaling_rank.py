"""A rank of bench/scaling.py: ddptrain's steps alone, without an evaluation and a checkpoint; prints images/s.

python bench/scaling_rank.py STEPS OPTIONS_OF_DDPTRAIN...
"""

import os
import sys
import time

import torch.distributed as dist

from ddptrain.datasets import SOURCES
from ddptrain.guard import Guard
from ddptrain.job import prepare
from ddptrain.options import parse
from ddptrain.phases import measure
from ddptrain.place import read_place
from ddptrain.step import train_step
from ddptrain.stream import batches, epoch_order, share_of
from ddptrain.world import enter, join, set_up_torch

WARM_UP = 2

steps, options = int(sys.argv[1]), parse(sys.argv[2:], os.environ)
place = read_place(os.environ, options.ranks)
set_up_torch(place, os.environ, deterministic=False)
join(place, options.ranks)
world = enter(place, options.machine.device, options.ranks)
size = options.training.batch_size
job = prepare(options, world, SOURCES["synthetic"].load(options.data, 0), batch_size=size)
guard, phases = Guard(world.device), measure(world.device, job.model.parameters(), alone=place.size == 1)
order = epoch_order(len(job.train), seed=0, epoch=0).to(world.device)
for step, batch in enumerate(batches(order, size, first=0)):
    if step == WARM_UP:
        began = time.monotonic()
    share = share_of(batch, rank=place.rank, world_size=place.size)
    phases.begin()
    loss = train_step(job, share, step=step + 1, epoch=0, lr=0.01, phases=phases, guard=guard)
    phases.end(step + 1)
    if step == WARM_UP + steps - 1:
        break
float(loss)  # wait for the device
print(f"{steps * size / (time.monotonic() - began):.3f}", flush=True)
if place.size > 1:
    dist.barrier()
os._exit(0)
