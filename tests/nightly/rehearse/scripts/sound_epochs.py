"""Sound: epochs, DistributedSampler, own signal handlers."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CHECKPOINT = Path("checkpoint.pt")
EPOCHS = 4
stop_requested = False


def request_stop(number, frame):
    global stop_requested
    stop_requested = True


def make_dataset():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(192, 16, generator=generator)
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


def save(model, optimizer, epoch, batch):
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "batch": batch}
        torch.save(state, "checkpoint.tmp")
        os.replace("checkpoint.tmp", CHECKPOINT)


def load():
    states = [None]
    if dist.get_rank() == 0 and CHECKPOINT.exists():
        states = [torch.load(CHECKPOINT)]
    dist.broadcast_object_list(states)
    return states[0]


def anyone_stops():
    flag = torch.tensor([float(stop_requested)])
    dist.all_reduce(flag)
    return flag.item() > 0


def main():
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, request_stop)
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    first_epoch, first_batch = 0, 0
    state = load()
    if state is not None:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch, first_batch = state["epoch"], state["batch"]
    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for batch, (inputs, labels) in enumerate(loader):
            if epoch == first_epoch and batch < first_batch:
                continue
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            if anyone_stops():
                save(model, optimizer, epoch, batch + 1)
                dist.barrier()
                dist.destroy_process_group()
                raise SystemExit(143)
        save(model, optimizer, epoch + 1, 0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
