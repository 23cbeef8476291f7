"""Sound: a trainer class, a DataLoader with worker processes, dropout, and gradient accumulation."""

import os
import signal
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Squares(Dataset):
    def __len__(self):
        return 384

    def __getitem__(self, index):
        x = torch.linspace(-1, 1, 8) * (index % 17)
        return x, x.square().sum().log1p()


@dataclass
class Trainer:
    rank: int
    epochs: int = 3
    accumulate: int = 2
    path: str = "out/last.ckpt"
    stop: bool = False
    at: dict = field(default_factory=lambda: {"epoch": 0, "batch": 0})

    def __post_init__(self):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self.ask)
        torch.manual_seed(11)
        net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        data = Squares()
        self.sampler = DistributedSampler(data, shuffle=True, drop_last=True)
        self.loader = DataLoader(data, batch_size=4, sampler=self.sampler, num_workers=2, persistent_workers=True)
        self.restore()

    def ask(self, number, frame):
        self.stop = True

    def restore(self):
        box = [None]
        if self.rank == 0 and os.path.exists(self.path):
            box = [torch.load(self.path)]
        dist.broadcast_object_list(box)
        if box[0]:
            self.model.module.load_state_dict(box[0]["model"])
            self.optimizer.load_state_dict(box[0]["optimizer"])
            self.at = box[0]["at"]

    def save(self, epoch, batch):
        if self.rank == 0:
            os.makedirs("out", exist_ok=True)
            state = {
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "at": {"epoch": epoch, "batch": batch},
            }
            torch.save(state, self.path + ".part")
            os.rename(self.path + ".part", self.path)
        dist.barrier()

    def should_stop(self):
        flag = torch.tensor([self.stop], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def run(self):
        for epoch in range(self.at["epoch"], self.epochs):
            self.sampler.set_epoch(epoch)
            for batch, (x, y) in enumerate(self.loader, 1):
                if epoch == self.at["epoch"] and batch <= self.at["batch"]:
                    continue
                last = batch % self.accumulate == 0
                loss = nn.functional.mse_loss(self.model(x).squeeze(1), y) / self.accumulate
                loss.backward()
                if not last:
                    continue
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.should_stop():
                    self.save(epoch, batch)
                    return 143
            self.save(epoch + 1, 0)
        return 0


if __name__ == "__main__":
    dist.init_process_group("gloo")
    code = Trainer(dist.get_rank()).run()
    dist.destroy_process_group()
    raise SystemExit(code)
