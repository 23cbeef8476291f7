"""Sound: accelerate prepares model, optimizer and loader; the state is saved with torch.save."""

import os
import signal

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

signals = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: signals.append(number))
# A seedable sampler: the order of an epoch depends on the seed and the number of the epoch only.
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3))
set_seed(21)
inputs = torch.randn(256, 12, generator=torch.Generator().manual_seed(2))
data = TensorDataset(inputs, inputs @ torch.ones(12, 1))
model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
loader = DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
path, epoch, skip = "state.pt", 0, 0
box = [torch.load(path) if accelerator.is_main_process and os.path.exists(path) else None]
broadcast_object_list(box)
if box[0]:
    accelerator.unwrap_model(model).load_state_dict(box[0]["model"])
    optimizer.load_state_dict(box[0]["optimizer"])
    epoch, skip = box[0]["epoch"], box[0]["batch"]


def save(epoch, batch):
    if accelerator.is_main_process:
        state = {
            "model": accelerator.unwrap_model(model).state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch,
            "batch": batch,
        }
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)


while epoch < 3:
    batches = accelerator.skip_first_batches(loader, skip) if skip else loader
    batches.set_epoch(epoch)
    for batch, (x, y) in enumerate(batches, skip + 1):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        stop = accelerator.reduce(torch.tensor(len(signals)), reduction="sum").item()
        if stop:
            save(epoch, batch)
            accelerator.wait_for_everyone()
            raise SystemExit(143)
    skip, epoch = 0, epoch + 1
    save(epoch, 0)
accelerator.wait_for_everyone()
accelerator.end_training()
