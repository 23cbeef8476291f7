# ruff: noqa: N803, N806 - tensors carry their shape in their name
"""What a step costs the model in floating-point operations: its forward pass counted once, by its products.

torch has a counter of its own (torch.utils.flop_counter), whose first use takes seconds of imports; a rank that is
started again has none to spare.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddptrain.job import Job

BACKWARD = 2  # a backward pass has two products for each of the forward pass


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the operations of matrix products, convolutions and attention; all else is small beside them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and count it."""
        result = func(*args, **(kwargs or {}))
        self.total += operations(func.overloadpacket.__name__, args, result)
        return result


def operations(name: str, args: Any, result: Any) -> int:
    """Of one call of aten's function ``name``; a multiplication and its addition are two."""
    products = 0
    if name in ("mm", "bmm"):
        products = prod(args[0].shape) * args[1].shape[-1]
    elif name in ("addmm", "baddbmm"):
        products = prod(args[1].shape) * args[2].shape[-1]
    elif name == "convolution":
        weight_OIhw, transposed = args[1], args[6]
        over = args[0] if transposed else result
        products = prod(weight_OIhw.shape[1:]) * prod(over.shape)
    elif "scaled_dot_product" in name:
        query_BHQD, key_BHKD, value_BHKE = args[:3]
        products = prod(query_BHQD.shape[:-1]) * key_BHKD.shape[-2] * (query_BHQD.shape[-1] + value_BHKE.shape[-1])
    return 2 * products


def of_a_step(job: Job) -> int:
    """Operations that a training step of this job takes for one sample; 0: nobody can say."""
    shape = job.data.shape
    images_BCHW = torch.zeros(1, shape.channels, shape.size_px, shape.size_px, device=job.world.device)
    with job.precision.autocast(job.world.device):
        return of_a_sample(job.model, images_BCHW.to(job.precision.compute))


def of_a_sample(model: nn.Module, images_BCHW: Tensor) -> int:
    """Operations that a training step takes for one sample; the model is left as it was. 0: nobody can say."""
    was_training = model.training
    model.eval()  # no statistics change, and nothing is drawn
    counter = Counter()
    try:
        with torch.enable_grad(), counter:
            model(images_BCHW)
    except (RuntimeError, ValueError):  # a model that takes no single image
        return 0
    finally:
        model.train(was_training)
    return (1 + BACKWARD) * counter.total // len(images_BCHW)
