"""A training step on a GPU waits for nothing: on tensors without data, each operator and copy is counted."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from tests.unit.ddptrain.test_fake_gpu import batch_of, build, gpu
from torch.utils._python_dispatch import TorchDispatchMode

from ddptrain.train_loop import local_loss, optimizer_step
from ddptrain.training_state import TrainingState

SYNCS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.is_nonzero")


class Operators(TorchDispatchMode):
    """Counts operators: those that wait for the GPU, copies between host and GPU, and all others as launches."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {value.device.type for value in args if isinstance(value, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (list, tuple)) else (result,)
        devices |= {value.device.type for value in results if isinstance(value, torch.Tensor)}
        if str(func).startswith(SYNCS):
            self.counts["sync"] += 1
        elif "cuda" in devices and "copy" in str(func) and len(devices) > 1:
            self.counts["copy"] += 1
        elif "cuda" in devices and not func.is_view:
            self.counts["launch"] += 1
        return result


def prepare_step(state: TrainingState) -> None:
    """Give each parameter a gradient: torch cannot run a backward pass of a GPU without one."""
    for parameter in state.model.parameters():
        parameter.grad = torch.empty_like(parameter)
    for group in state.optimizer.param_groups:
        group["fused"] = False  # torch has no fake implementation of the fused step


def count_step(*arguments: str, planted: Callable[[torch.Tensor], object] = lambda _: None) -> Counter[str]:
    """Build a batch, compute its loss and take an optimizer step on a GPU without data, without the backward pass."""
    with gpu():
        state = build("--precision=bf16", "--model=convnet", *arguments)
        prepare_step(state)
        operators, guard = Operators(), mock.Mock()  # the guard needs pinned memory and events
        with operators:
            loss = local_loss(state, state.ddp, batch_of(state), 1.0)
            optimizer_step(state, 0.1, step=1, guard=guard)
            try:
                planted(loss.detach())
            except Exception:  # FakeTensorMode refuses to give a value, after the operator was counted
                operators.counts["refused"] += 1
    return operators.counts


@pytest.mark.parametrize(
    "arguments", [(), ("--flip", "--shift=4"), ("--mixup=0.2", "--cutmix=1"), ("--cutout=4",), ("--clip=1",)]
)
def test_a_step_neither_waits_for_the_gpu_nor_copies(arguments: tuple[str, ...]) -> None:
    counts = count_step(*arguments)
    assert (counts["sync"], counts["copy"]) == (0, 0)
    assert counts["launch"] > 100, counts


@pytest.mark.parametrize(
    "planted", [lambda loss: loss.item(), bool, lambda loss: loss.cpu()], ids=["item", "bool", "cpu"]
)
def test_a_planted_wait_is_counted(planted: Callable[[torch.Tensor], object]) -> None:
    counts = count_step(planted=planted)
    assert counts["sync"] + counts["copy"] + counts["refused"] > 0
