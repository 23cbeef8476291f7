"""Gradient checkpointing: fewer activations are kept, and computed again in the backward pass."""

import contextlib
from collections.abc import Iterator
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(model: nn.Module) -> None:
    """Have the model's blocks keep their inputs only: its children, or theirs where a child is a row of layers."""
    for child in model.children():
        for block in child.children() if isinstance(child, nn.Sequential) else (child,):
            if any(True for _ in block.parameters()):
                again = partial(_contexts, block)
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=again)


def _contexts(block: nn.Module) -> tuple[contextlib.AbstractContextManager[None], ...]:
    return contextlib.nullcontext(), _no_statistics(block)


@contextlib.contextmanager
def _no_statistics(block: nn.Module) -> Iterator[None]:
    """Batch norms count a batch when it is first seen, not again when it is computed again."""
    norms = [module for module in block.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    counts = [None if count is None else count.clone() for _, _, count in before]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for (norm, momentum, count), was in zip(before, counts, strict=True):
            norm.momentum = momentum
            if count is not None and was is not None:
                count.copy_(was)
