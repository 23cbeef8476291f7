"""The path of a batch on a GPU, without one: tensors without data (FakeTensorMode) have its device and dtypes.

torch turns autocast and GradScaler for CUDA off where there is no GPU, without an error: ``gpu`` undoes that. Not run
here: kernels, streams and events, NCCL, pinned memory, and whether a step of fp16 is skipped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.cuda.amp import common

from ddptrain import training_state
from ddptrain.config import parse_options
from ddptrain.data import loader
from ddptrain.data.datasets import SOURCES
from ddptrain.distributed import RankInfo, World
from ddptrain.train_loop import local_loss
from ddptrain.training_state import DTYPES, TrainingState, build_training_state

CUDA = torch.device("cuda", 0)


def without_fakes(function: Any) -> Any:
    """Return the function with real tensors: what runs on the CPU before the data and the model go to the GPU."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


@contextmanager
def gpu(*, autocast: bool = True) -> Iterator[None]:
    """Make the GPU's path run on tensors without data."""
    patches = [
        mock.patch.object(common, "amp_definitely_not_available", return_value=not autocast),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        mock.patch.object(loader, "free_bytes", return_value=1 << 40),
        *(
            mock.patch.object(training_state, name, without_fakes(getattr(training_state, name)))
            for name in ("build_model", "normalisation_of_images")
        ),
    ]
    with FakeTensorMode(allow_non_fake_inputs=True):
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def build(*arguments: str) -> TrainingState:
    options = parse_options(
        ["--data=synthetic", "--synthetic-samples=64", "--synthetic-shape=3x32x32", "--batch-size=16", *arguments], {}
    )
    world = World(rank_info=RankInfo(), device=torch.device("cuda"), backend="gloo", data_group=None)
    with unset_fake_temporarily():
        data = SOURCES["synthetic"].load(options.data, 0)
    return build_training_state(options, world, data, batch_size=16)


def batch_of(state: TrainingState) -> Any:
    return state.batch_builder.batch(torch.arange(16, device="cuda"), epoch=0, mark=lambda _: None)


def logits_dtype(state: TrainingState) -> torch.dtype:
    with state.precision.autocast(state.world.device):
        logits: torch.Tensor = state.ddp(batch_of(state).inputs)
    assert logits.device == CUDA
    return logits.dtype


@pytest.mark.parametrize("channels_last", ["--channels-last", "--no-channels-last"])
@pytest.mark.parametrize("model", ["convnet", "resnet18"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "fp64"])
def test_batch_forward_loss_and_step(precision: str, model: str, channels_last: str) -> None:
    with gpu():
        state = build(f"--precision={precision}", f"--model={model}", channels_last, "--mixup=0.2", "--flip")
        batch = batch_of(state)
        wide = torch.float64 if precision == "fp64" else torch.float32
        assert {(one.device, one.dtype) for one in state.model.parameters()} == {(CUDA, wide)}
        assert (batch.inputs.device, batch.inputs.dtype) == (CUDA, DTYPES[precision])
        assert {batch.labels_B.device, batch.others_B.device, batch.own_B.device} == {CUDA}
        assert logits_dtype(state) == DTYPES[precision]
        loss = local_loss(state, state.ddp, batch, 1.0)
        assert (loss.device, loss.dtype, loss.shape) == (CUDA, wide, ())
        assert (state.precision.scaler is not None) == (precision == "fp16")
        if state.precision.scaler is not None:
            assert state.precision.scaler.is_enabled()
            assert state.precision.scaler.scale(loss).device == CUDA
        for parameter in state.model.parameters():
            parameter.grad = torch.empty_like(parameter)
        for group in state.optimizer.param_groups:
            assert group["fused"]
            group["fused"] = False  # torch has no fake implementation of the fused step
        state.optimizer.step()
        moments = [value for one in state.optimizer.state.values() for value in one.values() if value is not None]
        assert moments
        assert {moment.device for moment in moments} == {CUDA}


def test_data_parallel_computes_in_the_dtype_that_was_asked_for() -> None:
    with gpu():
        state = build("--precision=bf16", "--model=convnet", "--strategy=dp")
        images = batch_of(state).inputs
        with torch.autocast("cuda", torch.float16):  # as in a replica's thread: on, with CUDA's default
            assert state.ddp(images).dtype == torch.bfloat16


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
