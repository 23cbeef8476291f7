"""A short script for your own image. Each rank prints the sum of all ranks' numbers."""

import os

import torch
import torch.distributed as dist

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if on_gpu else "gloo")
total = torch.tensor(float(dist.get_rank()), device="cuda" if on_gpu else "cpu")
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the ranks' sum is {total.item():g}", flush=True)
dist.destroy_process_group()
