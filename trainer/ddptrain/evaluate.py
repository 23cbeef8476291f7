"""Exact evaluation: every held-out sample is counted once, on any number of ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddptrain.input.pixels import lay_out
from ddptrain.job import Job
from ddptrain.world import World, total

MOST_IMAGES = 1000
MOST_PIXELS = 4_000_000  # a pass


@torch.no_grad()
def count_right(job: Job) -> int:
    """How many of all test samples the model, not wrapped in DDP, classifies rightly; the same on every rank."""
    model, world, test = job.evaluated, job.world, job.test
    _share_buffers(model, world)
    was_training = model.training
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=world.device)
    size_px = job.data.shape.size_px
    count = min(MOST_IMAGES, max(1, MOST_PIXELS // size_px**2))
    rank, size = world.place.rank, world.place.size
    first, last = (len(test) * number // size for number in (rank, rank + 1))
    for start in range(first, last, count):
        part = slice(start, min(start + count, last))
        labels = test.labels_N[part].to(world.device)
        pixels = lay_out(test.images_NHWC[part].to(world.device), crop_px=size_px, shift_px=0, mirrored=False)
        images = job.preparation.normalise(pixels.middles(torch.arange(len(labels), device=world.device)))
        with job.precision.autocast(world.device):
            logits = _logits(model, images, flip=job.options.training.test_flip)
        right += (logits.argmax(1) == labels).sum()
    model.train(was_training)
    return int(total(world.place, right))


def _logits(model: nn.Module, images: Tensor, *, flip: bool) -> Tensor:
    logits: Tensor = model(images)
    return logits + model(images.flip(3)) if flip else logits


def _share_buffers(model: nn.Module, world: World) -> None:
    """Rank 0's batch norms on every rank: DDP shares them only before the next training step."""
    if world.data_group is not None:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0, group=world.data_group)
