"""A loss or a gradient that is no number: stopped before the optimizer's step, and named."""

import pytest
import torch
from tests.facts import assert_names

from ddptrain.callbacks import NonFinite, NonFiniteGuard
from ddptrain.train_loop import RankFinding, nonfinite_message


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_loss_that_is_none_has_no_gradient(bad: str) -> None:
    guard, weight = NonFiniteGuard(torch.device("cpu")), torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    guard.with_nan_gradient(weight.sum() + float(bad)).backward()
    with pytest.raises(NonFinite) as raised:
        guard.check(weight.grad.norm(), optimizer, step=17)
    assert raised.value.step == 17


def test_a_loss_that_is_a_number_is_left_as_it_is() -> None:
    guard = NonFiniteGuard(torch.device("cpu"))
    one, other = (torch.randn(100, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    guard.with_nan_gradient(one.exp().sum()).backward()
    other.exp().sum().backward()
    assert torch.equal(one.grad, other.grad)
    guard.check(one.grad.norm(), torch.optim.SGD([one], lr=0.1), step=1)
    assert guard.last_norm == pytest.approx(float(one.grad.norm()))


def test_what_a_scaler_passes_over_is_no_end_unless_it_does_not_stop() -> None:
    guard, weight = NonFiniteGuard(torch.device("cpu")), torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    infinite, well = torch.tensor(float("inf")), torch.tensor(1.0)
    for step, gradient in enumerate([infinite] * 19 + [well] + [infinite] * 19):
        guard.check(gradient, optimizer, step=step, scaled=True)
    with pytest.raises(NonFinite):
        guard.check(infinite, optimizer, step=40, scaled=True)


class Done:
    """An event of a GPU that has nothing left to do."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


def guard_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> NonFiniteGuard:
    """Take the path of a GPU, with tensors on the CPU."""
    guard = NonFiniteGuard(torch.device("cpu"))
    guard._flag, guard._step, guard._seen = (
        torch.zeros(()),
        torch.zeros((), dtype=torch.int64),
        torch.zeros((), dtype=torch.int64),
    )
    guard._copied, guard._known = None, False
    monkeypatch.setattr(torch.cuda, "Event", Done)
    return guard


def test_after_too_many_overflows_no_step_is_taken_before_it_becomes_known(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, weight = guard_of_a_gpu(monkeypatch), torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    seen = []
    for step in range(1, 25):
        optimizer.zero_grad()
        loss = weight.sum() * (float("inf") if 2 < step < 23 else 1.0)
        scaler.scale(guard.with_nan_gradient(loss)).backward()
        scaler.unscale_(optimizer)
        guard.check(weight.grad.norm(), optimizer, step=step, scaled=True)
        scaler.step(optimizer)
        scaler.update()
        seen.append(weight[0].item())
    assert seen == pytest.approx([0.9] + [0.8] * 23)  # the last two would have been finite
    assert guard.detected
    with pytest.raises(NonFinite) as raised:
        guard.raise_if_tripped()
    assert raised.value.step == 22


def test_the_ranks_with_a_non_finite_value_are_named() -> None:
    well, nan, gradient = (
        RankFinding(loss=1.0, gradient_finite=True),
        RankFinding(loss=float("nan"), gradient_finite=False),
        RankFinding(loss=1.0, gradient_finite=False),
    )
    for findings in ((well, nan, nan), (nan, gradient, well), (nan, nan), (well, well)):
        assert_names(nonfinite_message(findings, step=9, num_steps=90, lr=0.1), "90", "0.1", "--lr")
