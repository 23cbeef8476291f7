"""DDP as in PyTorch's first tutorial: one process spawns the ranks and chooses their address.

python examples/mp_spawn.py --world-size 2
ddprun examples/mp_spawn.py --world-size 2
ddpctl launch --gpus 2 --ranks 1 -- examples/mp_spawn.py --world-size 2
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup(rank: int, world_size: int) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def train(rank: int, world_size: int, epochs: int) -> None:
    setup(rank, world_size)
    torch.manual_seed(0)
    inputs = torch.randn(256, 10)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            loss = nn.functional.mse_loss(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"rank {rank} of {world_size}: epoch {epoch + 1}/{epochs} loss {loss.item():.4f}", flush=True)
    # In torch 2.13 to 2.15, destroy_process_group may abort with gloo (exit code 134) while a DDP model exists.
    del model, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    mp.spawn(train, args=(args.world_size, args.epochs), nprocs=args.world_size)
