import copy
import dataclasses
from typing import Any

import pytest
import torch
from tests.messages import refused
from torch import nn

from ddptrain.config import OptimizerOptions, parse_options
from ddptrain.data.base import ImageShape
from ddptrain.errors import TrainError
from ddptrain.models import build_model
from ddptrain.optimizer import Muon, build_optimizer, learning_rate

HOW = dataclasses.replace(parse_options([], {}).optimizer, lr=0.5)


def rates(schedule: str, *, ranks: int = 1, epochs: int = 10, **how: object) -> list[float]:
    """Of each step of epochs of two steps."""
    options: OptimizerOptions = dataclasses.replace(HOW, schedule=schedule, **how)
    steps = range(2 * epochs)
    return [learning_rate(options, ranks=ranks, step=step, num_steps=2 * epochs, steps_per_epoch=2) for step in steps]


def test_one_cycle_goes_up_for_three_tenths_and_down_and_cosine_down_from_the_peak() -> None:
    ten = rates("one-cycle", epochs=5)
    assert ten[0] == pytest.approx(0.02)
    assert ten[3] == 0.5
    assert (ten[:4], ten[3:]) == (sorted(ten[:4]), sorted(ten[3:], reverse=True))
    assert 0 < ten[9] < 0.05
    ten = rates("cosine", epochs=5)
    assert ten[0] == 0.5
    assert ten[5] == pytest.approx(0.25)
    assert ten == sorted(ten, reverse=True)
    assert rates("cosine", epochs=3, warmup=1)[2] == 0.5, "a warm-up leads to the peak"
    assert rates("steps", epochs=2, warmup=9)[3] == 0.5, "and ends before the training"


@pytest.mark.parametrize(
    ("schedule", "how", "expected"),
    [
        ("linear", {"epochs": 2}, [0.5, 0.375, 0.25, 0.125]),
        ("linear", {"epochs": 3, "warmup": 1}, [0.5 / 3, 1.0 / 3, 0.5, 0.375, 0.25, 0.125]),
        ("steps", {"epochs": 6, "milestones": (2, 5), "gamma": 0.2}, [0.5] * 4 + [0.1] * 6 + [0.02] * 2),
        ("constant", {}, [0.5] * 20),
        ("constant", {"epochs": 3, "warmup": 1.5}, [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]),
    ],
)
def test_a_schedule_has_its_rate_in_each_step(schedule: str, how: dict[str, Any], expected: list[float]) -> None:
    assert rates(schedule, **how) == pytest.approx(expected)


def test_a_rate_scaled_by_the_ranks_is_warmed_up_from_the_plain_one() -> None:
    scaled = rates("cosine", ranks=4, epochs=40, scale_lr=True)
    assert 0.5 < scaled[0] < 0.7
    assert scaled[10] == max(scaled) == 2.0  # after five epochs
    assert scaled[:11] == sorted(scaled[:11])
    short = rates("cosine", ranks=4, epochs=8, scale_lr=True)
    assert short[4] == max(short) == 2.0  # after a quarter of them
    assert rates("cosine", ranks=4, epochs=8, scale_lr=True, warmup=0.0)[0] == 2.0
    assert max(rates("one-cycle", ranks=4, scale_lr=True)) == 2.0


def small_model(memory_format: torch.memory_format = torch.contiguous_format) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 10))
    return model.to(memory_format=memory_format)  # type: ignore[call-overload,no-any-return]


def muon_model() -> tuple[nn.Module, Muon]:
    torch.manual_seed(0)
    model = build_model("cifarnet", ImageShape(channels=3, size_px=17, classes=10))
    optimizer = build_optimizer(
        model, dataclasses.replace(HOW, name="muon", sgd_lr=2.0, bias_lr=64.0, weight_decay=0.1)
    )
    assert isinstance(optimizer, Muon)
    return model, optimizer


def muon_step(model: nn.Module, optimizer: Muon) -> None:
    torch.manual_seed(1)
    optimizer.zero_grad()
    model(torch.randn(4, 3, 17, 17)).square().sum().backward()
    optimizer.step()


def test_muon_trains_the_hidden_weights_and_sgd_the_others() -> None:
    model, optimizer = muon_model()
    muon, matrices, biases = optimizer.param_groups
    assert [len(group["params"]) for group in (muon, matrices, biases)] == [6, 1, 7]
    assert [group.get("lr_scale") for group in (muon, matrices, biases)] == [None, 2.0, 128.0]
    assert [group["weight_decay"] for group in (muon, matrices, biases)] == [0.0, 0.1, 0.1 / 64]
    for group in (muon, matrices, biases):
        group["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    muon_step(model, optimizer)
    for name, value in model.named_parameters():
        if "convs" in name:  # of rate 0, the step only sets the norm
            assert value.norm().item() == pytest.approx(len(value) ** 0.5)
        else:
            assert torch.equal(value, before[name])


def test_muon_continues_from_a_saved_state() -> None:
    model, optimizer = muon_model()
    muon_step(model, optimizer)
    other, loaded = muon_model()
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for trained, of in ((model, optimizer), (other, loaded)):
        for group in of.param_groups:
            group["lr"] = 0.1 * group.get("lr_scale", 1.0)
        muon_step(trained, of)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


def test_muon_changes_nothing_if_a_gradient_is_not_finite() -> None:
    made: Any = muon_model()
    model, optimizer = made
    muon_step(model, optimizer)
    before = copy.deepcopy((dict(model.named_parameters()), optimizer.state_dict()["state"]))
    optimizer.found_inf = torch.ones(())
    model.groups[0].convs[0].weight.register_hook(lambda gradient: gradient * float("nan"))
    muon_step(model, optimizer)
    after = dict(model.named_parameters()), optimizer.state_dict()["state"]
    assert all(torch.equal(value, before[0][name]) for name, value in after[0].items())
    moments = [(state["momentum_buffer"], before[1][number]["momentum_buffer"]) for number, state in after[1].items()]
    assert len(moments) == 14
    assert all(torch.equal(*pair) for pair in moments)


def test_muon_is_refused_for_a_model_without_weights_for_it() -> None:
    with refused(TrainError, "--optimizer", "cifarnet", code=78):
        build_optimizer(small_model(), dataclasses.replace(HOW, name="muon"))
