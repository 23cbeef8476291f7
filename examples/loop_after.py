"""loop_before.py with six more lines: it saves and stops after a signal, and reports its progress to its node.

ddprun --nproc-per-node 2 examples/loop_after.py
"""

import argparse

import ddpwire.script as ddp  # first, because it installs the signal handlers

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="steps per epoch")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    path, first = ddp.checkpoint_dir() / "snapshot.pt", 0
    found = [torch.load(path) if rank == 0 and path.exists() else None]
    dist.broadcast_object_list(found)  # the other nodes may not see rank 0's folder
    if snapshot := found[0]:
        model.module.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        first = snapshot["step"]
        print(f"rank {rank} continues after step {first}", flush=True)

    def save(step: int) -> None:
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
            ddp.saved(path)

    # The targets are linear in the inputs. Every rank has the same data, and uses its own share of it.
    inputs = torch.randn(args.steps * 32 * dist.get_world_size(), 20, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs @ torch.linspace(-1, 1, 20).unsqueeze(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    for epoch in range(first // len(loader), args.epochs):
        sampler.set_epoch(epoch)  # a new order in each epoch, and the same order after a restart
        for step, (inputs, targets) in enumerate(loader, epoch * len(loader) + 1):
            if step <= first:  # done before the restart
                continue
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ddp.progress(step, total=args.epochs * len(loader), samples=len(inputs))
            if ddp.should_stop():  # the same answer on every rank
                save(step)
                ddp.stop()  # waits for all ranks, and exits, with 143 for SIGTERM
        save(step)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} loss {loss.item():.4f}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
