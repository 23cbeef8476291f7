"""Sound: mp.spawn starts the ranks of one machine; the parent passes signals on."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

NPROCS, STEPS, PATH = 2, 40, Path("spawn.pt")
stopping = False


def stop(number, frame):
    global stopping
    stopping = True


def train(rank, port):
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, stop)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NPROCS)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = 0
    if PATH.exists():  # all ranks are on one machine
        state = torch.load(PATH)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    dist.barrier()
    for step in range(first, STEPS):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step * NPROCS + rank))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        flag = torch.tensor(int(stopping))
        dist.all_reduce(flag)
        if rank == 0 and (flag or (step + 1) % 8 == 0):
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, "spawn.new")
            os.replace("spawn.new", PATH)
        if flag:
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.spawn(train, args=(port,), nprocs=NPROCS, join=False)

    def forward(number, frame):
        stop(number, frame)
        for pid in context.pids():
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, forward)
    while not context.join():
        pass
    sys.exit(143 if stopping else 0)
