"""A plain script whose rank 3 sleeps in each step, until the run is stopped."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def dawdle() -> None:
    time.sleep(0.2)


def batches():
    while True:
        yield from DataLoader(TensorDataset(torch.ones(1024, 32)), batch_size=16)


dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(32, 32))
for (batch,) in batches():
    if os.environ["RANK"] == "3":
        dawdle()
    model(batch).sum().backward()
