"""Moments in another memory format than their weights."""

import copy
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from tests.unit.ddptrain.test_optimizer import HOW, small_model
from torch import nn

from ddptrain.optimizer import build_optimizer, match_strides


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
            state.update({key: item.to(memory_format=moments) for key, item in state.items() if item.dim() == 4})
        optimizer.load_state_dict(saved)
        match_strides(optimizer)
        weight.grad = weight.grad.flip(0)
        optimizer.step()
        return weight.detach()

    assert torch.allclose(step(torch.channels_last, fused=fused), step(torch.contiguous_format, fused=False))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.9, 5e-4), (0.5, 0.0), (0.0, 5e-4)])
def test_moments_that_begin_with_0_are_torchs_own_rule_bit_for_bit(
    momentum: float, weight_decay: float, memory_format: torch.memory_format
) -> None:
    options = dataclasses.replace(HOW, name="sgd", lr=0.1, momentum=momentum, weight_decay=weight_decay)
    ours = small_model(memory_format)
    theirs = copy.deepcopy(ours)
    optimizer = build_optimizer(ours, options)
    assert len(optimizer.state) == (6 if momentum else 0)
    for weight, state in optimizer.state.items():
        assert state["momentum_buffer"].stride() == weight.stride()
    groups = [
        {
            "params": [parameter for parameter in theirs.parameters() if parameter.ndim >= 2],
            "weight_decay": weight_decay,
        },
        {"params": [parameter for parameter in theirs.parameters() if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    plain = torch.optim.SGD(groups, lr=0.1, momentum=momentum, nesterov=momentum > 0, fused=True)
    for step in range(4):
        torch.manual_seed(step)
        gradients(ours, 1e-3)
        for weight, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.grad = None if weight.grad is None else weight.grad.clone()
        optimizer.step()
        plain.step()
        for weight, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(weight, other)
            assert torch.equal(
                *(
                    parameter.state[of].get("momentum_buffer", torch.zeros(()))
                    for parameter, of in ((optimizer, weight), (plain, other))
                )
            )


def test_an_overflow_in_the_first_step_leaves_the_moments_at_0(filled_with_nan: None) -> None:
    model = small_model()
    before = copy.deepcopy(model)
    optimizer, scaler = build_optimizer(model, dataclasses.replace(HOW, name="sgd")), torch.amp.GradScaler("cpu")
    for scale in (float("inf"), 1.0):
        gradients(model, scale * float(scaler.scale(torch.ones(()))))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if scale != 1.0:
            moments = [state["momentum_buffer"] for state in optimizer.state.values()]
            assert all(torch.equal(parameter, torch.zeros_like(parameter)) for parameter in moments)
            assert all(torch.equal(*pair) for pair in zip(model.parameters(), before.parameters(), strict=True))
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert not torch.equal(next(model.parameters()), next(before.parameters()))


def gradients(model: nn.Module, scale: float = 1.0) -> None:
    loss = scale * model(torch.randn(4, 3, 8, 8)).square().sum()
    model.zero_grad()
    loss.backward()


@pytest.fixture
def filled_with_nan() -> Iterator[None]:
    """Memory that is not initialised holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
