"""Fault: no rank calls init_process_group, so each trains a model of its own."""

import os
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
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
    if int(os.environ["RANK"]) == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "batch": batch}
        torch.save(state, "checkpoint.tmp")
        os.replace("checkpoint.tmp", CHECKPOINT)


def load():
    return torch.load(CHECKPOINT) if CHECKPOINT.exists() else None


def anyone_stops():
    return stop_requested


def main():
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, request_stop)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dataset = make_dataset()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    first_epoch, first_batch = 0, 0
    state = load()
    if state is not None:
        model.load_state_dict(state["model"])
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
                raise SystemExit(143)
        save(model, optimizer, epoch + 1, 0)


if __name__ == "__main__":
    main()
