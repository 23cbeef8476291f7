"""Run on each rank: the gradient of one global batch in float64, against that of the whole batch in this process."""

import os
import sys

import torch

from ddptrain.job import distributed
from ddptrain.models import ImageShape, build_model
from ddptrain.place import read_place
from ddptrain.step import weighted_loss
from ddptrain.stream import share_of
from ddptrain.world import enter, join

place = read_place(os.environ)
join(place, timeout_s=60)
world = enter(place, "cpu", timeout_s=60)
torch.manual_seed(0)
shape = ImageShape(channels=1, size_px=8, classes=10)
model = build_model("digitsnet", shape).double()
alone = build_model("digitsnet", shape).double()
alone.load_state_dict(model.state_dict())
ddp = distributed(model, world)
images, labels = torch.rand(64, 1, 8, 8, dtype=torch.float64), torch.arange(64) % 10
for batch_size in (int(text) for text in sys.argv[1:]):
    batch = torch.arange(64)[:batch_size]
    share = share_of(batch, rank=place.rank, world_size=place.size)
    model.zero_grad()
    weighted_loss(ddp(images[share.indices_N]), labels[share.indices_N], share.weight, 0.1).backward()
    alone.zero_grad()
    torch.nn.functional.cross_entropy(alone(images[batch]), labels[batch], label_smoothing=0.1).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    worst = max(float((one.grad - other.grad).abs().max() / other.grad.abs().max()) for one, other in pairs)
    print(f"{batch_size} {'equal' if worst < 1e-12 else worst}", flush=True)
torch.distributed.barrier()
os._exit(0)
