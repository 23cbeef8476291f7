"""Moments in another memory format than their weights."""

import pytest
import torch

from ddptrain.optimizer import match_strides


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("fused", [True, False])
def test_moments_of_the_other_memory_format_belong_to_their_weights(name: str, fused: bool) -> None:
    """A checkpoint of --channels-last in a training of --no-channels-last: the fused step would mix the elements up."""

    def step(moments: torch.memory_format, *, fused: bool) -> torch.Tensor:
        weight = torch.arange(120.0).reshape(2, 3, 4, 5).clone().requires_grad_()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
        if name == "sgd":
            optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=fused)
        weight.grad = torch.arange(120.0).reshape(2, 3, 4, 5)
        optimizer.step()
        saved = optimizer.state_dict()
        for state in saved["state"].values():
            state.update({key: one.to(memory_format=moments) for key, one in state.items() if one.dim() == 4})
        optimizer.load_state_dict(saved)
        match_strides(optimizer)
        weight.grad = weight.grad.flip(0)
        optimizer.step()
        return weight.detach()

    assert torch.allclose(step(torch.channels_last, fused=fused), step(torch.contiguous_format, fused=False))
