"""Run on each rank: a thousand healthy steps, then one rank three times slower; what rank 0 says of it.

The times of the steps are a clock's own, with the noise of a busy machine, so that no machine spoils the test; the
ranks and what they tell each other are real.
"""

import os
import random
from collections import deque

import torch.distributed as dist

from ddptrain.options.ranks import RankOptions
from ddptrain.place import read_place
from ddptrain.straggler import Comparison, Naming
from ddptrain.whereabouts import named, whereabouts
from ddptrain.world import join

HEALTHY, SLOW = 1000, 3.0

place = read_place(os.environ)
join(place, RankOptions(timeout_s=60))
now_s = 0.0
where = whereabouts(place, os.environ)
chance = random.Random(place.rank)
own_s: deque[float] = deque(maxlen=100)


def tell(naming: Naming, step: int) -> None:
    print(named(naming, where[naming.rank], step), flush=True)


ranks = Comparison(
    place.rank,
    place.size,
    tell=tell,
    clock=lambda: now_s,
)
for step in range(1, HEALTHY + 101):
    took_s = 0.1 * chance.lognormvariate(0, 0.15) * (5 if chance.random() < 0.02 else 1)
    slow = place.rank == 1 and HEALTHY < step <= HEALTHY + 50
    own_s.append(took_s * (SLOW if slow else 1))
    now_s += 0.1 * (SLOW if HEALTHY < step <= HEALTHY + 50 else 1)
    ranks.after(step, own_s)
ranks.answer(step)
dist.barrier()
os._exit(0)
