"""A loss or a gradient that is no number: stopped before the optimizer's step, and named."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.wording import Wording

from ddptrain.callbacks import NonFinite, NonFiniteGuard
from ddptrain.checkpoint import load_checkpoint
from ddptrain.train_loop import RankFinding, nonfinite_message

POISONED = """
import runpy, sys
import torch
from ddptrain import train_loop

kind = sys.argv.pop(1)
local_loss, seen = train_loop.local_loss, set()

class Infinite(torch.autograd.Function):
    @staticmethod
    def forward(context, parameter):
        context.shape = parameter.shape
        return torch.zeros(())

    @staticmethod
    def backward(context, gradient):
        return torch.full(context.shape, float("inf"))

def poisoned(state, model, batch, weight):
    # On rank 1 at step 17, also when it is computed once more.
    seen.add(float(batch.inputs.sum()))
    loss = local_loss(state, model, batch, weight)
    if state.world.rank_info.rank == 1 and len(seen) == 17:
        loss = loss + (float("nan") if kind == "loss" else Infinite.apply(next(model.parameters())))
    return loss

train_loop.local_loss = poisoned
sys.argv[0] = "ddptrain"
runpy.run_module("ddptrain", run_name="__main__")
"""


@pytest.mark.parametrize("kind", ["loss", "grad"])
def test_one_rank_s_nan_stops_all_before_the_step(
    train: Callable[..., list], tmp_path: Path, kind: str, wording: Wording
) -> None:
    options = (kind, "--deterministic", "--checkpoint-every", "1", "--keep", "0", "--epochs", "2")
    rank_0, rank_1 = train(*options, size=2, command=("-c", POISONED))
    assert (rank_0.code, rank_1.code, rank_1.err) == (65, 65, "")
    wording(re.sub(r"lr [0-9.]+\)", "lr N)", rank_0.err))
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*.pt"))
    assert names == [f"step-{step:08d}.pt" for step in range(1, 17)]
    newest = load_checkpoint(tmp_path / "checkpoints" / names[-1])
    tensors = [*newest.parts["model"].values()]
    tensors += [state["momentum_buffer"] for state in newest.parts["optimizer"]["state"].values()]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)


def test_a_training_that_diverges_ends_with_the_last_good_weights(
    train: Callable[..., list], tmp_path: Path, wording: Wording
) -> None:
    ended = train("--lr", "1e30", "--checkpoint-every", "1", "--epochs", "1")[0]
    assert ended.code == 65
    (failed,) = map(int, re.findall(r"step (\d+)", ended.err))
    line = re.sub(r"step \d+", "step N", re.sub(r"lr [0-9.e+]+\)", "lr N)", ended.err))
    wording(re.sub("the (loss is (nan|inf)|gradient is not finite) on", "WHAT on", line))
    newest = max((tmp_path / "checkpoints").glob("step-*.pt"))
    assert int(newest.name[5:13]) == failed - 1
    assert all(bool(weight.isfinite().all()) for weight in load_checkpoint(newest).parts["model"].values())


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


def test_the_ranks_with_a_non_finite_value_are_named(wording: Wording) -> None:
    well, nan, gradient = (
        RankFinding(loss=1.0, gradient_finite=True),
        RankFinding(loss=float("nan"), gradient_finite=False),
        RankFinding(loss=1.0, gradient_finite=False),
    )
    for findings in ((well, nan, nan), (nan, gradient, well), (nan, nan), (well, well)):
        wording(nonfinite_message(findings, step=9, num_steps=90, lr=0.1))
