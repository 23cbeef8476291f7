"""Sound: a plain loop over steps with ddpwire.script, no DataLoader; momentum and a schedule."""

import ddpwire.script as ddp

import torch
import torch.distributed as dist
from torch import nn

STEPS = 48

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(3)
model = nn.parallel.DistributedDataParallel(nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
path, first = ddp.checkpoint_dir() / "last.pt", 0
state = [torch.load(path) if rank == 0 and path.exists() else None]
dist.broadcast_object_list(state)
if state[0]:
    model.module.load_state_dict(state[0]["model"])
    optimizer.load_state_dict(state[0]["optimizer"])
    schedule.load_state_dict(state[0]["schedule"])
    first = state[0]["step"]

for step in range(first + 1, STEPS + 1):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 10, generator=generator)
    loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    ddp.progress(step, total=STEPS, samples=8)
    stop = ddp.should_stop()
    if rank == 0 and (stop or step % 10 == 0 or step == STEPS):
        saved = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "step": step,
        }
        torch.save(saved, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        ddp.saved(path)
    if stop:
        ddp.stop()
dist.barrier()
