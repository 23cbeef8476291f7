"""The path of a batch on a GPU, without one: tensors without data (FakeTensorMode) have its device and dtypes.

torch turns autocast and GradScaler for CUDA off where there is no GPU, without an error: ``gpu`` undoes that. Not run
here: kernels, streams and events, NCCL, pinned memory, and whether a step of fp16 is skipped.

A training step on a GPU waits for nothing: its operators, copies and waits are counted. torch cannot run a backward
pass on tensors of a GPU without one. So ``count_step`` counts a step without the backward pass on tensors without data,
and ``count_loop`` counts the complete loop on a CPU, with the guard of a GPU.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.cuda.amp import common
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddprank.heartbeat import Heart
from ddprank.signals import Signals
from ddptrain import training_state
from ddptrain.callbacks import Callbacks, NonFiniteGuard, ProgressDisplay, StopVote
from ddptrain.config import parse_options
from ddptrain.data import loader
from ddptrain.data.datasets import SOURCES
from ddptrain.data.sampling import seed_step
from ddptrain.distributed import RankInfo, World
from ddptrain.goodput import Goodput
from ddptrain.metrics import Metrics
from ddptrain.step_timing import Phases, Tracer
from ddptrain.straggler import StragglerDetector
from ddptrain.train_loop import local_loss, optimizer_step, train
from ddptrain.training_state import DTYPES, TrainingState, build_training_state
from ddpwire.events import EventLog

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


def prepare_step(state: TrainingState) -> None:
    """Give each parameter a gradient: torch cannot run a backward pass of a GPU without one."""
    for parameter in state.model.parameters():
        parameter.grad = torch.empty_like(parameter)
    for group in state.optimizer.param_groups:
        group["fused"] = False  # torch has no fake implementation of the fused step


@pytest.mark.parametrize("channels_last", ["--channels-last", "--no-channels-last"])
@pytest.mark.parametrize("model", ["convnet", "resnet18"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "fp64"])
def test_batch_forward_loss_and_step(precision: str, model: str, channels_last: str) -> None:
    with gpu():
        state = build(f"--precision={precision}", f"--model={model}", channels_last, "--mixup=0.2", "--flip")
        batch = batch_of(state)
        wide = torch.float64 if precision == "fp64" else torch.float32
        assert {(weights.device, weights.dtype) for weights in state.model.parameters()} == {(CUDA, wide)}
        assert (batch.inputs.device, batch.inputs.dtype) == (CUDA, DTYPES[precision])
        assert {batch.labels_B.device, batch.others_B.device, batch.own_B.device} == {CUDA}
        assert logits_dtype(state) == DTYPES[precision]
        loss = local_loss(state, state.ddp, batch, 1.0)
        assert (loss.device, loss.dtype, loss.shape) == (CUDA, wide, ())
        assert (state.precision.scaler is not None) == (precision == "fp16")
        if state.precision.scaler is not None:
            assert state.precision.scaler.is_enabled()
            assert state.precision.scaler.scale(loss).device == CUDA
        assert all(group["fused"] for group in state.optimizer.param_groups)
        prepare_step(state)
        state.optimizer.step()
        moments = [
            moment for states in state.optimizer.state.values() for moment in states.values() if moment is not None
        ]
        assert moments
        assert {moment.device for moment in moments} == {CUDA}


def test_data_parallel_computes_in_the_dtype_that_was_asked_for() -> None:
    with gpu():
        state = build("--precision=bf16", "--model=convnet", "--strategy=dp")
        images = batch_of(state).inputs
        with torch.autocast("cuda", torch.float16):  # as in a replica's thread: on, with CUDA's default
            assert state.ddp(images).dtype == torch.bfloat16


SYNCS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.is_nonzero")


class Operators(TorchDispatchMode):
    """Counts operators: those that wait for the GPU, copies between host and GPU, and all others as launches."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.device = device
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {value.device.type for value in tree_leaves((args, result)) if isinstance(value, torch.Tensor)}
        if str(func).startswith(SYNCS):
            self.counts["sync"] += 1
        elif "cuda" in devices and "copy" in str(func) and len(devices) > 1:
            self.counts["copy"] += 1
        elif self.device in devices and not func.is_view and not str(func).startswith("prim."):
            self.counts["launch"] += 1
        return result


def count_step(*arguments: str, planted: Callable[[torch.Tensor], object] = lambda _: None) -> Counter[str]:
    """Build a batch, compute its loss and take an optimizer step on a GPU without data, without the backward pass."""
    with gpu():
        state = build("--precision=bf16", "--model=convnet", *arguments)
        prepare_step(state)
        operators, guard = Operators(), mock.Mock()  # the guard needs pinned memory and events
        with operators:
            loss = local_loss(state, state.ddp, batch_of(state), 1.0)
            optimizer_step(state, 0.1, step=1, phases=Phases(), guard=guard)
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
    assert counts["launch"] > 50, counts


class StepCounts(Phases):
    """Records the counts at the beginning of each step."""

    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self.operators = operators
        self.counts: list[Counter[str]] = []

    def begin(self) -> None:
        self.counts.append(self.operators.counts.copy())
        super().begin()


def gpu_guard(monkeypatch: pytest.MonkeyPatch) -> NonFiniteGuard:
    """Return the guard of a GPU, whose copies of the flag do not arrive."""
    event = mock.Mock()
    event.return_value.query.return_value = False
    monkeypatch.setattr(torch.cuda, "Event", event)
    zeros = torch.zeros

    def on_cpu(*size: int, dtype: torch.dtype | None = None, **_: object) -> torch.Tensor:
        return zeros(*size, dtype=dtype)  # pinned memory needs a GPU

    with mock.patch.object(torch, "zeros", on_cpu):
        return NonFiniteGuard(torch.device("cuda"))


def loop_state(*arguments: str) -> TrainingState:
    sizes = ("--synthetic-shape=3x32x32", "--synthetic-samples=64", "--batch-size=16", "--epochs=2", "--precision=fp32")
    options = parse_options(["--data=synthetic", "--model=convnet", *sizes, *arguments], {})
    world = World(rank_info=RankInfo(), device=torch.device("cpu"), backend="gloo", data_group=None)
    return build_training_state(options, world, SOURCES["synthetic"].load(options.data, 0), batch_size=16)


def count_loop(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[Counter[str]]:
    """Train two epochs of four steps. Return the counts of each step but the last of an epoch."""
    state = loop_state(*arguments)
    operators, guard = Operators("cpu"), gpu_guard(monkeypatch)
    phases = StepCounts(operators)
    callbacks = Callbacks(
        poll_stop=StopVote(RankInfo(), Signals(), guard, after_s=0, started=0).poll,
        heartbeat=Heart(None),
        metrics=Metrics(),
        goodput=Goodput(0.0, steps_before=0),
        phases=phases,
        guard=guard,
        stragglers=StragglerDetector(0, 1, on_event=lambda *_: None),
        tracer=Tracer(0, Path(), log=print),
        progress=ProgressDisplay(),
        ddp=None,
        events=EventLog(None, node=0),
        on_gpu=False,
    )
    with operators:
        train(state, first_step=0, callbacks=callbacks, due=lambda _: False, save=lambda *_: None)
    steps = [after - before for before, after in pairwise(phases.counts)]
    return steps[:3] + steps[4:]


# The most operators of a step. On a GPU, an operator starts one kernel or more, and takes about 5 us of the host.
@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        ((), 57),
        (("--flip", "--shift=4"), 68),
        (("--ema=0.9", "--clip=1", "--accumulate=2"), 114),
        (("--optimizer=adamw", "--mixup=0.2"), 125),
        (("--model=cifarnet", "--optimizer=muon", "--bias-lr=64", "--alternate-flip", "--reflect"), 270),
    ],
)
def test_the_loop_with_its_backward_pass_waits_for_nothing(
    arguments: tuple[str, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = count_loop(monkeypatch, *arguments)
    assert len(steps) == 6
    assert [counts["sync"] for counts in steps] == [0] * 6
    assert min(counts["launch"] for counts in steps) <= most


def test_seeding_a_step_starts_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    with Operators("cpu") as operators:
        seed_step(torch.device("cuda"), seed=0, step=1, rank=0)
    assert (len(seeds), operators.counts.total()) == (1, 0)


def test_a_compiled_model_has_static_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs need them: a smaller last batch has a graph of its own."""
    sizes: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        sizes.append([value.shape[0] for value in inputs if isinstance(value, torch.Tensor) and value.ndim == 4][-1])
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    state = loop_state("--compile=default", "--model=simple", "--no-channels-last")
    for size in (16, 12, 16, 8):
        state.ddp(torch.zeros(size, 3, 32, 32))
    assert sizes == [16, 12, 8]
    assert all(type(size) is int for size in sizes)


def test_a_trace_is_taken_without_the_lines_of_the_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "")
    del os.environ["KINETO_LOG_LEVEL"]
    tracer = Tracer(1, tmp_path / "trace", log=print)
    tracer.begin()
    tracer.end()
    assert os.environ["KINETO_LOG_LEVEL"] == "99"
