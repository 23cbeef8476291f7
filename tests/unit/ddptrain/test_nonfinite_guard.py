"""A loss or a gradient that is no number: stopped before the optimizer's step, and named."""

import pytest
import torch
from tests.messages import assert_names

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
    loss, other = (torch.randn(100, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    guard.with_nan_gradient(loss.exp().sum()).backward()
    other.exp().sum().backward()
    assert torch.equal(loss.grad, other.grad)
    guard.check(loss.grad.norm(), torch.optim.SGD([loss], lr=0.1), step=1)
    assert guard.last_norm == pytest.approx(float(loss.grad.norm()))


def test_what_a_scaler_passes_over_is_no_end_unless_it_does_not_stop() -> None:
    guard, weight = NonFiniteGuard(torch.device("cpu")), torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    infinite, well = torch.tensor(float("inf")), torch.tensor(1.0)
    for step, gradient in enumerate([infinite] * 19 + [well] + [infinite] * 19):
        guard.check(gradient, optimizer, step=step, scaled=True)
    with pytest.raises(NonFinite):
        guard.check(infinite, optimizer, step=40, scaled=True)


def test_the_ranks_with_a_non_finite_value_are_named() -> None:
    well, nan, gradient = (
        RankFinding(loss=1.0, gradient_finite=True),
        RankFinding(loss=float("nan"), gradient_finite=False),
        RankFinding(loss=1.0, gradient_finite=False),
    )
    for findings in ((well, nan, nan), (nan, gradient, well), (nan, nan), (well, well)):
        assert_names(nonfinite_message(findings, step=9, num_steps=90, lr=0.1), "90", "0.1", "--lr")
