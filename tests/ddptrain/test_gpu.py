"""What is done otherwise on a GPU, so that it is never waited for. Needs one."""

import time

import pytest
import torch

from ddptrain.guard import Guard, NonFinite
from ddptrain.phases import EventPhases
from ddptrain.snapshot import Snapshot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_after_a_nan_no_weight_and_no_state_changes_and_it_becomes_known(kind: str) -> None:
    guard, weight = Guard(torch.device("cuda")), torch.ones(1000, device="cuda", requires_grad=True)
    if kind == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    else:
        optimizer = torch.optim.AdamW([weight], fused=True)
    before: list[torch.Tensor] = []
    for step in range(1, 11):
        optimizer.zero_grad()
        loss = weight.sum() * (float("nan") if step == 4 else 1.0)
        guard.loss(loss).backward()
        if step == 4:
            state = [one for one in optimizer.state[weight].values() if isinstance(one, torch.Tensor)]
            before = [one.clone() for one in (weight.detach(), *state)]
        guard.gradient(weight.grad.norm(), optimizer, step=step)
        optimizer.step()
    after = [weight.detach(), *(one for one in optimizer.state[weight].values() if isinstance(one, torch.Tensor))]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    deadline = time.monotonic() + 10
    while not guard.seen:
        assert time.monotonic() < deadline
        guard.gradient(torch.ones((), device="cuda"), optimizer, step=11)
    assert guard.tripped
    with pytest.raises(NonFinite) as raised:
        guard.prove()
    assert raised.value.step == 4


def test_the_phases_of_a_step_are_its_time() -> None:
    phases, matrix = EventPhases(), torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        phases.begin()
        for phase, number in (("forward", 2), ("backward", 4), ("optimizer", 1)):
            for _ in range(number):
                matrix = (matrix @ matrix).clamp(-1, 1)
            if phase == "backward":
                phases.gradients_ready()
            phases.mark(phase)
        phases.end()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    phases.begin()
    assert sum(phases.totals.values()) == pytest.approx(seconds, rel=0.1)
    assert phases.totals["backward"] == pytest.approx(4 * phases.totals["optimizer"], rel=0.3)
    assert phases.totals["comm_exposed"] < 0.1 * phases.totals["backward"]
    assert len(phases.own_s) == 20


def test_a_copy_is_of_the_moment_of_the_call() -> None:
    snapshot, weight = Snapshot(), torch.zeros(50_000_000, device="cuda")
    kept = snapshot.take({"weight": weight})
    weight.add_(1)
    snapshot.wait()
    assert kept["weight"].is_pinned()
    assert float(kept["weight"].sum()) == 0
