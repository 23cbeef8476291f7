"""Sound: FSDP2 with torch.distributed.checkpoint, on a disk that all nodes share."""

import signal
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, FOLDER = 36, Path("checkpoints")
requested = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, lambda number, frame: requested.append(number))


def newest():
    steps = sorted(int(path.name.split("-")[1]) for path in FOLDER.glob("step-*"))
    return steps[-1] if steps else 0


def save(model, optimizer, step):
    part, final = FOLDER / f".step-{step}.part", FOLDER / f"step-{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
        FOLDER.mkdir(exist_ok=True)
    dist.barrier()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=part)
    dist.barrier()
    if dist.get_rank() == 0:
        part.rename(final)
    dist.barrier()


def load(model, optimizer, step):
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=FOLDER / f"step-{step}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = newest()
    agreed = [step]
    dist.broadcast_object_list(agreed)
    step = agreed[0]
    if step:
        load(model, optimizer, step)
    while step < STEPS:
        step += 1
        inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 100 + rank))
        loss = (model(inputs) - inputs[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        flag = torch.tensor(len(requested))
        dist.all_reduce(flag)
        if flag or step % 9 == 0:
            save(model, optimizer, step)
        if flag:
            dist.destroy_process_group()
            sys.exit(143)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
