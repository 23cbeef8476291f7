"""Run on each rank: the gradient of one global batch in float64, against that of the whole batch in this process.

gradients.py BATCH_SIZE[/ACCUMULATE]...
"""

import os
import sys

import torch

from ddptrain.datasets import SOURCES
from ddptrain.guard import Guard
from ddptrain.job import prepare
from ddptrain.options import parse
from ddptrain.options.ranks import RankOptions
from ddptrain.phases import ClockPhases
from ddptrain.place import Place, read_place
from ddptrain.step import gradients
from ddptrain.stream import share_of
from ddptrain.world import World, enter, join

ARGUMENTS = ("--data=synthetic", "--synthetic-samples=64", "--synthetic-shape=1x8x8", "--model=digitsnet")
ARGUMENTS += ("--precision=fp64", "--label-smoothing=0.1", "--shift=1", "--mixup=0.4", "--cutmix=1", "--cutout=2")

place = read_place(os.environ)
how = RankOptions(timeout_s=60)
join(place, how)
together = enter(place, "cpu", how)
alone = World(place=Place(), device=torch.device("cpu"), backend="gloo", data_group=None)
for word in sys.argv[1:]:
    size, _, parts = word.partition("/")
    options = parse([*ARGUMENTS, f"--accumulate={parts or 1}"], {})
    data = SOURCES["synthetic"].load(options.data, 0)
    found = []
    for world in (together, alone):
        job = prepare(options, world, data, batch_size=int(size))
        share = share_of(torch.arange(64)[: int(size)], rank=world.place.rank, world_size=world.place.size)
        gradients(
            job,
            job.preparation.batch(share.indices_N, epoch=0),
            share.weight,
            phases=ClockPhases(),
            guard=Guard(world.device),
        )
        found.append([parameter.grad for parameter in job.model.parameters()])
    worst = max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(*found, strict=True))
    print(f"{word} {'equal' if worst < 1e-12 else worst}", flush=True)
torch.distributed.barrier()
os._exit(0)
