"""Exact evaluation: every held-out sample is counted once, on any number of ranks."""

import torch
import torch.distributed as dist
from torch import nn

from ddptrain.datasets.dataset import Normalisation, Samples
from ddptrain.world import World, total

BATCH_SIZE = 1000


@torch.no_grad()
def count_right(model: nn.Module, test: Samples, normalise: Normalisation, world: World) -> int:
    """How many of all test samples the model, not wrapped in DDP, classifies rightly; the same on every rank."""
    _share_buffers(model, world)
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=world.device)
    mine = torch.arange(len(test)).tensor_split(world.place.size)[world.place.rank]
    for indices in torch.split(mine.to(world.device), BATCH_SIZE):
        logits = model(normalise(test.images_NCHW[indices]))
        right += (logits.argmax(1) == test.labels_N[indices]).sum()
    model.train()
    return int(total(world.place, right))


def _share_buffers(model: nn.Module, world: World) -> None:
    """Rank 0's batch norms on every rank: DDP shares them only before the next training step."""
    if world.data_group is not None:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0, group=world.data_group)
