"""FSDP in a script's own loop: torch's fully_shard, checkpoints of complete weights, and ddpwire to stop and resume.

ddprun --nproc-per-node 2 examples/fsdp.py
"""

import sys

import ddpwire.script as ddp  # first, because it installs the signal handlers

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard


def main() -> None:
    num_steps = int(sys.argv[1]) if sys.argv[1:] else 60
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same weights on every rank, before they are sharded
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    path, first, loss = ddp.checkpoint_dir() / "snapshot.pt", 0, torch.tensor(torch.nan)
    found = rank == 0 and path.exists()  # the other nodes may not see rank 0's folder
    snapshot = torch.load(path, mmap=True, weights_only=True) if found else {"model": {}, "step": 0}
    resumed_after = [snapshot["step"]]
    dist.broadcast_object_list(resumed_after)
    if first := resumed_after[0]:
        whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, snapshot["model"], options=whole)  # each rank loads its rows
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def save(step: int) -> None:
        on_first = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=on_first)  # every rank calls this; only rank 0 gets the weights
        if rank == 0:
            torch.save({"model": weights, "step": step}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
            ddp.saved(path)

    for step in range(first + 1, num_steps + 1):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        inputs = torch.randn(32, 20, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True) / 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ddp.progress(step, total=num_steps, samples=len(inputs))
        if ddp.should_stop():
            save(step)
            ddp.stop()
    save(num_steps)
    own = sum(one.to_local().numel() for one in model.parameters())
    print(f"rank {rank}: steps {first + 1} to {num_steps}, {own} parameters, loss {loss.item():.4f}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
