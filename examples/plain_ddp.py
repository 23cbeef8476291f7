"""A DDP training as in the tutorials for torchrun. It does not use ddpctl.

torchrun --nproc-per-node 2 examples/plain_ddp.py --epochs 3
ddpctl launch --nodes 2 --gpus 2 -- examples/plain_ddp.py --epochs 3
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()

    on_gpu, local_rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()

    # The targets are linear in the inputs, plus noise. Every rank has the same data.
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2048, 20, generator=generator)
    targets = inputs @ torch.linspace(-1, 1, 20) + 0.1 * torch.randn(2048, generator=generator)
    dataset = TensorDataset(inputs, targets.unsqueeze(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_of = nn.MSELoss()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1, device=device)
        for batch, target in loader:
            loss = loss_of(model(batch.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            mean = total.item() / (len(loader) * dist.get_world_size())
            print(f"epoch {epoch + 1}/{args.epochs} loss {mean:.4f} on {dist.get_world_size()} ranks", flush=True)
    # In torch 2.13 to 2.15, destroy_process_group may abort with gloo (exit code 134) while a DDP model exists.
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
