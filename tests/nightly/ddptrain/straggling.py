"""Run on each rank: a thousand healthy steps, then one rank three times slower, five times; what rank 0 says of it.

The times of the steps are a clock's own, with the noise of a busy machine, so that no machine spoils the test; the
ranks and what they tell each other are real.
"""

import os
import random
import sys
from collections import deque

import torch.distributed as dist

from ddptrain.config import RankOptions
from ddptrain.distributed import join_ranks, read_rank_info
from ddptrain.straggler import StragglerDetector, StragglerEvent, gather_rank_hosts, straggler_message

HEALTHY, SLOW, TIMES = 1000, 3.0, 5
LASTS = 150  # steps
STEP_S = float(sys.argv[1])

rank_info = read_rank_info(os.environ)
join_ranks(rank_info, RankOptions(timeout_s=60))
now_s = 0.0
where = gather_rank_hosts(rank_info, os.environ)
chance = random.Random(rank_info.rank)
own_s: deque[float] = deque(maxlen=100)


def report(event: StragglerEvent, step: int) -> None:
    print(straggler_message(event, where[event.rank], step), flush=True)


detector = StragglerDetector(
    rank_info.rank,
    rank_info.size,
    on_event=report,
    clock=lambda: now_s,
)


def is_slow(step: int) -> bool:
    """In five spells, each of which begins at another place between two questions."""
    spell, since = divmod(step - HEALTHY - 1, 2 * LASTS + 1)
    return step > HEALTHY and spell < TIMES and since < LASTS


for step in range(1, HEALTHY + TIMES * (2 * LASTS + 1) + 1):
    took_s = STEP_S * chance.lognormvariate(0, 0.15) * (5 if chance.random() < 0.02 else 1)
    slow = rank_info.rank == 1 and is_slow(step)
    own_s.append(took_s * (SLOW if slow else 1))
    now_s += STEP_S * (SLOW if is_slow(step) else 1)
    detector.after_step(step, own_s)
detector.read_answer(step)
dist.barrier()
os._exit(0)
