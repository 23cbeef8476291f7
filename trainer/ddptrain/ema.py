"""A moving average of the weights, which is evaluated in their place."""

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Ema:
    """The average: ``decay`` of it stays a step. It follows faster at first, when the weights are still anywhere."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(requires_grad=False)
        self._decay = decay
        self._weights = _numbers(model)
        self._averages = _numbers(self.model)
        self._counts = [
            (own, given)
            for own, given in zip(self.model.buffers(), model.buffers(), strict=True)
            if not own.is_floating_point()
        ]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after ``step`` steps, and the batch norms' statistics."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._averages, self._weights, 1 - decay)
        for own, given in self._counts:
            own.copy_(given)

    def state_dict(self) -> dict[str, Any]:
        """The average."""
        return self.model.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Go on from a saved one."""
        return self.model.load_state_dict(state_dict)


def _numbers(model: nn.Module) -> list[Tensor]:
    return [one.detach() for one in (*model.parameters(), *model.buffers()) if one.is_floating_point()]
