"""A loss or a gradient that is no number: stopped before the optimizer's step, and named."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.messages import assert_names

from ddptrain.callbacks import NonFinite, NonFiniteGuard
from ddptrain.checkpoint import load_checkpoint


def test_a_training_that_diverges_ends_with_the_last_good_weights(train: Callable[..., list], tmp_path: Path) -> None:
    ended = train("--lr", "1e30", "--checkpoint-every", "1", "--epochs", "1")[0]
    assert ended.code == 65
    (failed,) = map(int, re.findall(r"step (\d+)", ended.err))
    line = re.sub(r"step \d+", "step N", re.sub(r"lr [0-9.e+]+\)", "lr N)", ended.err))
    assert_names(re.sub("the (loss is (nan|inf)|gradient is not finite) on", "WHAT on", line), "45", "rank 0", "--lr")
    newest = max((tmp_path / "checkpoints").glob("step-*.pt"))
    assert int(newest.name[5:13]) == failed - 1
    assert all(bool(weight.isfinite().all()) for weight in load_checkpoint(newest).parts["model"].values())


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
