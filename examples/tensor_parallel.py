"""Tensor parallelism with DTensor: the columns of one layer and the rows of the next are split over the ranks.

ddprun --nproc-per-node 2 examples/tensor_parallel.py

Each rank has a part of each weight, and computes on the complete batch. The first layer's outputs stay split. One
all-reduce after the second layer adds them up. Rank 0 also computes the result without a split, to compare.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Perceptron(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(20, 64), nn.Linear(64, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return a number for each input."""
        return self.down(torch.relu(self.up(inputs)))


def train(model: nn.Module, steps: int = 20) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    for step in range(steps):
        inputs = torch.randn(32, 20, generator=torch.Generator().manual_seed(step))  # the same on every rank
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True) / 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone = Perceptron()
    split = parallelize_module(
        copy.deepcopy(alone),
        dist.init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",)),
        {"up": ColwiseParallel(), "down": RowwiseParallel()},
    )
    loss, own = train(split), sum(one.to_local().numel() for one in split.parameters())
    total = sum(one.numel() for one in alone.parameters())
    print(f"rank {rank} of {size}: {own} of {total} parameters, loss {loss:.5f}", flush=True)
    if rank == 0:
        print(f"one process: loss {train(alone):.5f}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
