"""A loss or a gradient that is no number: stopped before the optimizer's step, and named."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddptrain.checkpoint import load
from ddptrain.diagnosis import Finding, told
from ddptrain.guard import Guard, NonFinite

POISONED = """
import runpy, sys
import torch
import ddptrain.diagnosis
from ddptrain import step

kind = sys.argv.pop(1)
local_loss, seen = step.local_loss, set()

class Infinite(torch.autograd.Function):
    @staticmethod
    def forward(context, parameter):
        context.shape = parameter.shape
        return torch.zeros(())

    @staticmethod
    def backward(context, gradient):
        return torch.full(context.shape, float("inf"))

def poisoned(job, model, batch, weight):
    # On rank 1 at step 17, also when it is computed once more.
    seen.add(float(batch.images_BCHW.sum()))
    loss = local_loss(job, model, batch, weight)
    if job.world.place.rank == 1 and len(seen) == 17:
        loss = loss + (float("nan") if kind == "loss" else Infinite.apply(next(model.parameters())))
    return loss

step.local_loss = ddptrain.diagnosis.local_loss = poisoned
sys.argv[0] = "ddptrain"
runpy.run_module("ddptrain", run_name="__main__")
"""
TAIL = (
    " (lr {lr}); the weights are those of step {before}, and no checkpoint has seen it: "
    "try a lower --lr, or look at the data"
)


@pytest.mark.parametrize(
    ("kind", "what"), [("loss", "the loss is nan on rank 1"), ("grad", "the gradient is not finite on rank 1")]
)
def test_one_rank_s_nan_stops_all_before_the_step(
    train: Callable[..., list], tmp_path: Path, kind: str, what: str
) -> None:
    options = (kind, "--deterministic", "--checkpoint-every", "1", "--keep", "0", "--epochs", "2")
    rank_0, rank_1 = train(*options, size=2, command=("-c", POISONED))
    assert (rank_0.code, rank_1.code, rank_1.err) == (65, 65, "")
    lr = re.findall(r"lr ([0-9.]+)\)", rank_0.err)[0]
    assert rank_0.err == f"ddptrain: step 17 of 90 was not taken: {what}{TAIL.format(lr=lr, before=16)}\n"
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*.pt"))
    assert names == [f"step-{step:08d}.pt" for step in range(1, 17)]
    newest = load(tmp_path / "checkpoints" / names[-1])
    tensors = [*newest.parts["model"].values()]
    tensors += [state["momentum_buffer"] for state in newest.parts["optimizer"]["state"].values()]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)


def test_a_training_that_diverges_ends_with_the_last_good_weights(train: Callable[..., list], tmp_path: Path) -> None:
    ended = train("--lr", "1e30", "--checkpoint-every", "1", "--epochs", "1")[0]
    assert ended.code == 65
    said = re.fullmatch(
        r"ddptrain: step (\d+) of 45 was not taken: the (?:loss is (?:nan|inf)|gradient is not finite) on rank 0 "
        r"\(lr [0-9.e+]+\); the weights are those of step (\d+), and no checkpoint has seen it: "
        r"try a lower --lr, or look at the data\n",
        ended.err,
    )
    assert said
    newest = max((tmp_path / "checkpoints").glob("step-*.pt"))
    assert int(newest.name[5:13]) == int(said[2]) == int(said[1]) - 1
    assert all(bool(weight.isfinite().all()) for weight in load(newest).parts["model"].values())


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_loss_that_is_none_has_no_gradient(bad: str) -> None:
    guard, weight = Guard(torch.device("cpu")), torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    guard.loss(weight.sum() + float(bad)).backward()
    with pytest.raises(NonFinite) as raised:
        guard.gradient(weight.grad.norm(), optimizer, step=17)
    assert raised.value.step == 17


def test_a_loss_that_is_a_number_is_left_as_it_is() -> None:
    guard = Guard(torch.device("cpu"))
    one, other = (torch.randn(100, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    guard.loss(one.exp().sum()).backward()
    other.exp().sum().backward()
    assert torch.equal(one.grad, other.grad)
    guard.gradient(one.grad.norm(), torch.optim.SGD([one], lr=0.1), step=1)
    assert guard.last_norm == pytest.approx(float(one.grad.norm()))


def test_what_a_scaler_passes_over_is_no_end_unless_it_does_not_stop() -> None:
    guard, weight = Guard(torch.device("cpu")), torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    infinite, well = torch.tensor(float("inf")), torch.tensor(1.0)
    for step, gradient in enumerate([infinite] * 19 + [well] + [infinite] * 19):
        guard.gradient(gradient, optimizer, step=step, scaled=True)
    with pytest.raises(NonFinite):
        guard.gradient(infinite, optimizer, step=40, scaled=True)


def test_who_is_named() -> None:
    well, nan, gradient = (
        Finding(loss=1.0, gradient_finite=True),
        Finding(loss=float("nan"), gradient_finite=False),
        Finding(loss=1.0, gradient_finite=False),
    )
    tail = TAIL.format(lr="0.1", before=8)
    cases = (
        ((well, nan, nan), "the loss is nan on ranks 1, 2"),
        ((nan, gradient, well), "the loss is nan on rank 0 and the gradient is not finite on rank 1"),
        ((nan, nan), "the loss is nan on every rank"),
        ((well, well), "the gradient's norm is not finite, though each rank's share of it is"),
    )
    for findings, what in cases:
        assert told(findings, step=9, num_steps=90, lr=0.1) == f"step 9 of 90 was not taken: {what}{tail}"
