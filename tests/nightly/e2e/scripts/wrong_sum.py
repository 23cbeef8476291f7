"""ddpcheck on a machine that computes wrong sums: on rank 1 all_reduce adds 1 to its first three elements."""

import sys

import torch.distributed as dist

right = dist.all_reduce


def wrong(tensor, *args, **kwargs):
    right(tensor, *args, **kwargs)
    if "group" in kwargs and dist.get_rank() == 1:
        tensor[:3] += 1


dist.all_reduce = wrong
sys.argv = ["ddpcheck", "bench", "--sizes", "4096", "--record"]

from ddpcheck.__main__ import main  # noqa: E402

main()
