"""The state of a rank's training: model, optimizer, data, precision and TensorBoard. Also activation checkpointing."""

import contextlib
import copy
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddptrain import compat
from ddptrain.balance import Balance
from ddptrain.cifarnet import CifarNet
from ddptrain.communication import Communication
from ddptrain.config import MachineOptions, Options, TrainingOptions
from ddptrain.data.augment import normalisation_of_imagenet, normalisation_of_images
from ddptrain.data.base import ImageDataset
from ddptrain.data.loader import BatchBuilder, make_batch_builder
from ddptrain.data.sampling import num_batches
from ddptrain.data.text import TextBatches, TextDataset, refuse_image_options
from ddptrain.distributed import RankInfo, WithAutocast, World, agree, find_ddp, gather, is_sharded, wrap_model
from ddptrain.errors import TrainError, config_error, log_error, os_errors
from ddptrain.models import build_gpt, build_model, load_pretrained
from ddptrain.optimizer import WeightAverage, build_optimizer, learning_rate
from ddpwire.exits import Exit

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.utils.tensorboard import SummaryWriter

    from ddptrain.sharding import Sharding

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
WHITENING_IMAGES = 1000  # enough for the covariance of a patch
BACKWARD_RATIO = 2  # a backward pass has two products for each of the forward pass


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The precision of a training."""

    name: str
    compute: torch.dtype  # of the matrix products
    weights: torch.dtype  # of the parameters
    scaler: torch.amp.GradScaler | None  # keeps fp16's gradients from becoming 0

    @property
    def mixed(self) -> bool:
        """Whether autocast is needed."""
        return self.compute != self.weights

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Return the context manager for a forward pass."""
        return torch.autocast(device.type, self.compute) if self.mixed else contextlib.nullcontext()


def choose_precision(options: MachineOptions, device: torch.device) -> Precision:
    """Return the precision that the options ask for. Raises TrainError if the device does not support it."""
    name = options.precision
    if name == "auto":
        name = "fp32" if options.deterministic else fastest_precision(device)
    if name == "fp16" and device.type == "cpu":
        raise config_error("--precision fp16 needs a GPU", hint="give bf16, fp32 or auto")
    compute = DTYPES[name]
    weights = torch.float64 if name == "fp64" else torch.float32
    scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
    return Precision(name=name, compute=compute, weights=weights, scaler=scaler)


def same_precision(options: MachineOptions, world: World) -> MachineOptions:
    """Return the options. Replace the precision ``auto`` with one that all ranks support. Every rank must call this."""
    if options.precision != "auto":
        return options
    choices = gather(world.rank_info, choose_precision(options, world.device).name)
    name = lowest_precision(choices)
    if world.rank_info.is_first and len(set(choices)) > 1:
        reason = f"rank {choices.index(name)} supports nothing faster"
        log_error(f"every rank computes in {name}, because {reason}; choose another precision with --precision")
    return replace(options, precision=name)


def lowest_precision(choices: Sequence[str]) -> str:
    """Return the precision that all ranks support. ``choices`` contains the fastest precision of each rank."""
    return min(choices, key=("fp32", "fp16", "bf16").index)


def fastest_precision(device: torch.device) -> str:
    """Return bf16 if the hardware supports it without emulation, otherwise fp16 on a GPU and fp32 on a CPU."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if compat.has_cpu_bf16() else "fp32"


def open_tensorboard(folder: Path | None) -> "SummaryWriter | None":
    """Return a writer of TensorBoard's event files, or None without a folder. Raises TrainError."""
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter

        with os_errors(Exit.CANNOT_WRITE, f"--tensorboard {folder} cannot be written"):
            return SummaryWriter(str(folder))
    except ImportError:
        message = "--tensorboard needs tensorboard, which is not installed: pip install tensorboard"
        raise TrainError(Exit.NO_INPUT, message) from None


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The state of one training on one rank. ``ddp`` is ``model`` with its wrappers, if it has any."""

    options: Options
    world: World
    data: ImageDataset | TextDataset
    batch_builder: BatchBuilder | TextBatches  # of training images
    precision: Precision
    model: nn.Module
    ddp: nn.Module
    sharding: "Sharding | None"  # None: every rank has the complete model
    optimizer: torch.optim.Optimizer
    communication: Communication | None  # None: plain DDP, a single rank, or sharding
    ema: WeightAverage | None
    tensorboard: "SummaryWriter | None"
    batch_size: int  # over all ranks
    balance: Balance

    @property
    def steps_per_epoch(self) -> int:
        """The number of optimizer steps in an epoch. The last step may have a smaller batch."""
        return num_batches(len(self.data.train), self.batch_size)

    @property
    def num_steps(self) -> int:
        """The number of optimizer steps of the complete training."""
        return self.options.training.epochs * self.steps_per_epoch

    @property
    def parts(self) -> "dict[str, Stateful]":
        """The objects whose states a checkpoint contains, keyed by the name of the part of the checkpoint."""
        parts: dict[str, Stateful | None] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "ema": self.ema,
            "scaler": self.precision.scaler,
            "balance": self.balance if self.balance.is_measured else None,
            "communication": self.communication if self.communication and self.communication.has_state else None,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def lr(self, step: int) -> float:
        """Return the learning rate of step ``step``, counted from 0."""
        return learning_rate(
            self.options.optimizer,
            ranks=self.world.rank_info.size,
            step=step,
            num_steps=self.num_steps,
            steps_per_epoch=self.steps_per_epoch,
        )


def global_batch_size(options: TrainingOptions, rank_info: RankInfo) -> int:
    """Return the number of samples in an optimizer step over all ranks. Raises TrainError."""
    if options.batch_size_per_rank:
        return options.batch_size_per_rank * rank_info.size
    if options.batch_size < rank_info.size:
        raise config_error(
            f"--batch-size {options.batch_size} is too small for {rank_info.size} ranks",
            hint=f"give at least {rank_info.size}, or fewer ranks",
            rank=None,
        )
    return options.batch_size


def build_training_state(
    options: Options, world: World, data: ImageDataset | TextDataset, *, batch_size: int
) -> TrainingState:
    """Build the model, optimizer and input on the device. The seed determines the weights. Raises TrainError."""
    precision = choose_precision(options.machine, world.device)
    sharding = None
    if is_sharded(options.ranks, world.rank_info):
        from ddptrain.sharding import make_sharding

        if precision.scaler is not None:
            message = f"--strategy {options.ranks.strategy} cannot be used with --precision fp16"
            raise config_error(message, hint="give --precision bf16 or fp32")
        sharding = make_sharding(options.ranks, world)
    torch.manual_seed(options.training.seed)
    if sharding is None:
        layout = torch.channels_last if options.machine.channels_last else torch.preserve_format
        model = initial_model(options, data)
        model = model.to(world.device, precision.weights, memory_format=layout)  # type: ignore[call-overload]
    else:  # only rank 0 has the complete weights, on the CPU
        weights = agree(world.rank_info, lambda: initial_model(options, data) if world.rank_info.is_first else None)
        with torch.device("meta"):
            model = initial_model(options, data).to(precision.weights)
    if options.model.recompute:
        enable_recompute(model)
    average = copy.deepcopy(model).requires_grad_(requires_grad=False) if options.training.ema else None
    if sharding is not None:
        for module in [model] if average is None else [model, average]:
            sharding.apply(module, weights, precision.compute if precision.mixed else None)
        del weights
    ema = None if average is None else WeightAverage(model, average, options.training.ema)
    balance = Balance(options, world.rank_info)
    batch_builder = _make_batches(options, world, data, precision, balance, batch_size=batch_size)
    ddp, optimizer, communication = model, build_optimizer(model, options.optimizer), None
    if sharding is None:
        if options.ranks.strategy == "dp":
            ddp = WithAutocast(model, partial(precision.autocast, world.device))
        ddp = wrap_model(ddp, options.ranks, world, deterministic=options.machine.deterministic)
        steps_per_epoch = num_batches(len(data.train), batch_size)
        communication = _make_communication(options, world, ddp, optimizer, steps_per_epoch)
        ddp = model if communication is not None and communication.is_local else ddp
        if options.machine.compile != "off":
            ddp = cast(nn.Module, torch.compile(ddp, mode=options.machine.compile, dynamic=False))
    return TrainingState(
        options=options,
        world=world,
        data=data,
        batch_builder=batch_builder,
        precision=precision,
        model=model,
        sharding=sharding,
        ddp=ddp,
        optimizer=optimizer,
        communication=communication,
        ema=ema,
        tensorboard=open_tensorboard(options.training.tensorboard) if world.rank_info.is_first else None,
        batch_size=batch_size,
        balance=balance,
    )


def _make_communication(
    options: Options, world: World, ddp: nn.Module, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> Communication | None:
    text, wrapped = options.ranks.communication, find_ddp(ddp)
    if wrapped is None or text == "plain":
        return None
    if choose_precision(options.machine, world.device).scaler is not None and text not in ("bf16", "fp16"):
        message = f"--communication {text} cannot be used with --precision fp16"
        raise config_error(message, hint="give --precision bf16 or fp32")
    return Communication(text, wrapped, optimizer, world, steps_per_epoch=steps_per_epoch)


def initial_model(options: Options, data: ImageDataset | TextDataset) -> nn.Module:
    """Return the model with its initial weights. On the meta device, there are no weights to load or compute."""
    if isinstance(data, TextDataset):
        return build_gpt(options.model, context=data.context)
    model = build_model(options.model.name, data.shape, stem=options.model.stem, norm=options.model.norm)
    if next(model.parameters()).is_meta:
        return model
    if isinstance(model, CifarNet):
        images = data.train.images_NHWC[:: 1 + len(data.train) // WHITENING_IMAGES]
        model.whiten(normalisation_of_images(images)(images))
    if options.model.pretrained:
        load_pretrained(model, options.model)
    return model


def _make_batches(
    options: Options,
    world: World,
    data: ImageDataset | TextDataset,
    precision: Precision,
    balance: Balance,
    *,
    batch_size: int,
) -> BatchBuilder | TextBatches:
    if isinstance(data, TextDataset):
        refuse_image_options(options)
        return TextBatches(options, data, world.device)
    if options.model.pretrained:
        normalise = normalisation_of_imagenet(data.shape.channels)
    else:
        normalise = normalisation_of_images(data.train.images_NHWC)
    normalise = normalise.to(world.device, precision.compute)
    return make_batch_builder(options, data, world, normalise, batch_size=batch_size, shard_of=balance.shard_of)


def fingerprint(state: dict[str, Tensor]) -> str:
    """Return 16 hex digits of a SHA-256 of tensors, their names, dtypes and shapes. Every rank must call this."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole = compat.whole_tensor(tensor.detach())  # one at a time, to save memory
        digest.update(whole.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def enable_recompute(model: nn.Module) -> None:
    """Turn on activation checkpointing: each block keeps only its inputs, and recomputes its activations.

    A block is a child of the model that has parameters. If a child of the model is an nn.Sequential, its own children
    with parameters are blocks instead.
    """
    for child in model.children():
        for block in child.children() if isinstance(child, nn.Sequential) else (child,):
            if any(True for _ in block.parameters()):
                contexts = partial(lambda block: (contextlib.nullcontext(), _no_statistics(block)), block)
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


@contextlib.contextmanager
def _no_statistics(block: nn.Module) -> Iterator[None]:
    """Keep the statistics of batch norms unchanged while activations are recomputed."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    norms = [module for module in block.modules() if isinstance(module, kinds)]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    counts = [None if count is None else count.clone() for _, _, count in before]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for (norm, momentum, count), was in zip(before, counts, strict=True):
            norm.momentum = momentum
            if count is not None and was is not None:
                count.copy_(was)


def step_flops(state: TrainingState) -> int:
    """Return the number of floating-point operations per sample in a training step, or 0 if it is unknown."""
    device, data = state.world.device, state.data
    if isinstance(data, TextDataset):
        inputs = torch.zeros(1, data.context, dtype=torch.int64, device=device)
    else:
        channels, size_px = data.shape.channels, data.shape.size_px
        inputs = torch.zeros(1, channels, size_px, size_px, device=device, dtype=state.precision.compute)
    if state.sharding is not None:  # the sharded model's forward pass needs the other ranks
        with torch.device("meta"):
            return sample_flops(initial_model(state.options, data), inputs.to("meta", non_blocking=True))
    with state.precision.autocast(device):
        return sample_flops(state.model, inputs)


def sample_flops(model: nn.Module, inputs: Tensor) -> int:
    """Return the operations of matrix products, convolutions and attention per sample of a training step, or 0."""
    # Imported here: its import takes 0.2 s, or 5 ms after the optimizer has imported torch._dynamo.
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    # torch 2.10 does not count attention on a CPU.
    cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
    formulas = {cpu_attention: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)}  # type: ignore[no-untyped-call]
    was_training = model.training
    model.eval()  # no batch statistics, no dropout
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    try:
        with torch.enable_grad(), counter:
            model(inputs)
    except (RuntimeError, ValueError):  # a model that cannot take a single image
        return 0
    finally:
        model.train(was_training)
    return (1 + BACKWARD_RATIO) * counter.get_total_flops() // len(inputs)
