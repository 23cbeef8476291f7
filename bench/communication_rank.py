"""A rank of bench/communication.py and bench/scaling.py: runs ddptrain's steps without evaluations and checkpoints.

Rank 0 prints a JSON object with the seconds of a step. Without steps, all ranks time all-reduces.

python bench/communication_rank.py WARM_UP STEPS OPTIONS_OF_DDPTRAIN...
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from ddpcheck import collectives
from ddpcheck.collectives import Ranks
from ddptrain.callbacks import NonFiniteGuard
from ddptrain.config import parse_options
from ddptrain.data.datasets import SOURCES
from ddptrain.data.sampling import batches, epoch_order, shard_of
from ddptrain.distributed import join_ranks, make_world, read_rank_info, set_up_torch
from ddptrain.step_timing import measure_phases
from ddptrain.train_loop import train_step
from ddptrain.training_state import build_training_state
from ddpwire.communication import PROBES


def all_reduces() -> dict[int, float]:
    """Return the seconds of an all-reduce by its size in bytes, as ``ddpctl bench --advise`` measures them."""
    ranks = Ranks(
        rank=dist.get_rank(), device=torch.device("cpu"), nodes=(0, 1), hosts=("a", "b"), group=dist.group.WORLD
    )
    return {size: collectives.measure("all_reduce", ranks, size).seconds for size in PROBES}


def main() -> None:
    warm_up, steps, options = int(sys.argv[1]), int(sys.argv[2]), parse_options(sys.argv[3:], os.environ)
    rank_info = read_rank_info(os.environ, options.ranks)
    set_up_torch(rank_info, os.environ, deterministic=False)
    join_ranks(rank_info, options.ranks)
    link = all_reduces() if not steps else {}
    world = make_world(rank_info, options.machine.device, options.ranks)
    size = options.training.batch_size
    state = build_training_state(options, world, SOURCES["synthetic"].load(options.data, 0), batch_size=size)
    phases = measure_phases(world.device, state.model.parameters(), alone=rank_info.size == 1)
    guard, choice = NonFiniteGuard(world.device), None
    order = epoch_order(len(state.data.train), seed=0, epoch=0).to(world.device)
    began = ended = time.monotonic()
    for step, batch in enumerate(batches(order, size, first=0)):
        if step == warm_up:
            began = time.monotonic()
        if step == warm_up + steps:
            break
        shard = shard_of(batch, rank=rank_info.rank, shares=(1,) * rank_info.size)
        phases.begin()
        train_step(state, shard, step=step + 1, epoch=0, lr=0.01, phases=phases, guard=guard)
        phases.end(step + 1)
        ended = time.monotonic()
        if state.communication is not None:
            choice = state.communication.measure(phases) or choice
    number = sum(parameter.numel() for parameter in state.model.parameters())
    result = {
        "step_s": (ended - began) / max(1, steps),
        "batch_size": size,
        "parameters": number,
        "choice": choice,
        "all_reduce": link,
    }
    if rank_info.is_first:
        print(json.dumps(result), flush=True)
    if rank_info.size > 1:
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
