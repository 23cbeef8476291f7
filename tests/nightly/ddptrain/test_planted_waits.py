"""What the daily tests of the GPU's path would find: a wait, a tensor on the CPU, a path without autocast."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.ddptrain.test_fake_gpu import batch_of, build, count_loop, count_step, gpu, logits_dtype

from ddptrain import train_loop
from ddptrain.train_loop import local_loss


def test_a_tensor_that_stays_on_the_cpu_is_found() -> None:
    with gpu():
        state = build("--precision=bf16", "--model=convnet")
        batch = batch_of(state)
        planted = replace(batch, labels_B=torch.empty(16, dtype=torch.int64, device="cpu"))
        with pytest.raises(Exception, match="cpu"):
            local_loss(state, state.ddp, planted, 1.0)


def test_a_path_without_autocast_is_found() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"), gpu(autocast=False):  # noqa: PT031
        state = build("--precision=bf16", "--model=convnet")
        with pytest.raises(RuntimeError, match="should be the same"):  # the batch is bf16, the weights fp32
            logits_dtype(state)


@pytest.mark.parametrize(
    "planted", [lambda loss: loss.item(), bool, lambda loss: loss.cpu()], ids=["item", "bool", "cpu"]
)
def test_a_planted_wait_is_counted(planted: Callable[[torch.Tensor], object]) -> None:
    counts = count_step(planted=planted)
    assert counts["sync"] + counts["copy"] + counts["refused"] > 0


def test_a_wait_in_the_backward_pass_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train_loop.local_loss

    def planted(*arguments: Any) -> torch.Tensor:
        loss = plain(*arguments)
        loss.register_hook(lambda gradient: gradient.item() and None)
        return loss

    monkeypatch.setattr(train_loop, "local_loss", planted)
    assert [counts["sync"] for counts in count_loop(monkeypatch)] == [1] * 6
