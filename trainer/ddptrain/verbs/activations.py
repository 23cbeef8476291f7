"""What a model's backward pass keeps of its forward pass, measured without computing anything."""

import torch
from torch import Tensor, nn


def saved_bytes(model: nn.Module, batch: Tensor) -> int:
    """Bytes that autograd saves for the backward pass, without the parameters; model and batch on the meta device."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}  # by storage; held, so that no storage is made twice at the same address

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in parameters:
            kept[storage] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(batch).sum()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
