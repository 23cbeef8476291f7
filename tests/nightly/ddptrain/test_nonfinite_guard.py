"""A loss or a gradient that is no number: stopped before the optimizer's step, and named."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.facts import assert_names

from ddptrain.checkpoint import load_checkpoint

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
def test_one_rank_s_nan_stops_all_before_the_step(train: Callable[..., list], tmp_path: Path, kind: str) -> None:
    options = (kind, "--deterministic", "--checkpoint-every", "1", "--keep", "0", "--epochs", "2")
    rank_0, rank_1 = train(*options, size=2, command=("-c", POISONED))
    assert (rank_0.code, rank_1.code, rank_1.err) == (65, 65, "")
    assert_names(re.sub(r"lr [0-9.]+\)", "lr N)", rank_0.err), "17", "90", "rank 1", "--lr")
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*.pt"))
    assert names == [f"step-{step:08d}.pt" for step in range(1, 17)]
    newest = load_checkpoint(tmp_path / "checkpoints" / names[-1])
    tensors = [*newest.parts["model"].values()]
    tensors += [state["momentum_buffer"] for state in newest.parts["optimizer"]["state"].values()]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)


def test_a_training_that_diverges_ends_with_the_last_good_weights(train: Callable[..., list], tmp_path: Path) -> None:
    ended = train("--lr", "1e30", "--checkpoint-every", "1", "--epochs", "1")[0]
    assert ended.code == 65
    (failed,) = map(int, re.findall(r"step (\d+)", ended.err))
    line = re.sub(r"step \d+", "step N", re.sub(r"lr [0-9.e+]+\)", "lr N)", ended.err))
    assert_names(re.sub("the (loss is (nan|inf)|gradient is not finite) on", "WHAT on", line), "45", "rank 0", "--lr")
    newest = max((tmp_path / "checkpoints").glob("step-*.pt"))
    assert int(newest.name[5:13]) == failed - 1
    assert all(bool(weight.isfinite().all()) for weight in load_checkpoint(newest).parts["model"].values())
