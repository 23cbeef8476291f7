"""Pipeline parallelism with torch.distributed.pipelining: each rank has some of the layers, and a batch is split.

ddprun --nproc-per-node 2 examples/pipeline.py

The first rank reads the inputs, and the last rank computes the loss. While one rank works on a part of the batch, the
others work on other parts. GPipe's schedule makes all forward passes first.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

STEPS, BATCH, PARTS, WIDTH = 20, 32, 4, 20


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    is_last = rank == size - 1
    layers = nn.Linear(WIDTH, 1) if is_last else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    stage = PipelineStage(layers, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=PARTS, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05)
    means = []
    for step in range(STEPS):
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        targets = inputs.sum(1, keepdim=True) / 4
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = (inputs,) if rank == 0 else ()
        if is_last:
            schedule.step(*given, target=targets, losses=losses)
            means.append(torch.stack(losses).mean().item())
        else:
            schedule.step(*given)
        optimizer.step()
    count = sum(one.numel() for one in layers.parameters())
    ended = f", loss {means[0]:.4f} to {means[-1]:.4f}" if is_last else ""
    print(f"rank {rank} of {size}: stage of {count} parameters{ended}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
