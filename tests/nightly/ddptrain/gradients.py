"""Run on each rank: the gradient of one global batch in float64, against that of the whole batch in this process.

gradients.py BATCH_SIZE[/ACCUMULATE][@SHARES]...
"""

import os
import sys

import torch

from ddptrain.callbacks import NonFiniteGuard
from ddptrain.config import RankOptions, parse_options
from ddptrain.data.datasets import SOURCES
from ddptrain.distributed import RankInfo, World, join_ranks, make_world, read_rank_info
from ddptrain.step_timing import Phases
from ddptrain.train_loop import compute_gradients
from ddptrain.training_state import build_training_state

ARGUMENTS = ("--data=synthetic", "--synthetic-samples=64", "--synthetic-shape=1x8x8", "--model=digitsnet")
ARGUMENTS += ("--precision=fp64", "--label-smoothing=0.1", "--shift=1", "--mixup=0.4", "--cutmix=1", "--cutout=2")

rank_info = read_rank_info(os.environ)
how = RankOptions(timeout_s=60)
join_ranks(rank_info, how)
together = make_world(rank_info, "cpu", how)
alone = World(rank_info=RankInfo(), device=torch.device("cpu"), backend="gloo", data_group=None)
for word in sys.argv[1:]:
    (batch, _, shares) = word.partition("@")
    size, _, parts = batch.partition("/")
    options = parse_options([*ARGUMENTS, f"--accumulate={parts or 1}"], {})
    divided = parse_options([*ARGUMENTS, f"--accumulate={parts or 1}", f"--balance={shares or 'off'}"], {})
    data = SOURCES["synthetic"].load(options.data, 0)
    gradients = []
    for world in (together, alone):
        of_world = options if world is alone else divided
        state = build_training_state(of_world, world, data, batch_size=int(size))
        shard = state.balance.shard_of(torch.arange(64)[: int(size)])
        compute_gradients(
            state,
            state.batch_builder.batch(shard.indices_N, epoch=0),
            shard,
            phases=Phases(),
            guard=NonFiniteGuard(world.device),
        )
        gradients.append([parameter.grad for parameter in state.model.parameters()])
    worst = max(
        float((gradient - other).abs().max() / other.abs().max()) for gradient, other in zip(*gradients, strict=True)
    )
    print(f"{word} {'equal' if worst < 1e-12 else worst}", flush=True)
torch.distributed.barrier()
os._exit(0)
