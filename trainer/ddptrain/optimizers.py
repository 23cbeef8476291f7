"""The optimizers, and what is done to a gradient before they see it."""

import torch
from torch import nn

from ddptrain.options.optimizer import OptimizerOptions


def build_optimizer(model: nn.Module, how: OptimizerOptions) -> torch.optim.Optimizer:
    """Fused; norms and biases are not decayed, since their size says nothing of how much they have learned by heart."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": how.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if how.name == "adamw":
        return torch.optim.AdamW(groups, lr=how.lr, betas=(how.momentum, 0.999), fused=True)
    return torch.optim.SGD(groups, lr=how.lr, momentum=how.momentum, nesterov=how.momentum > 0, fused=True)
