"""Everything that one rank trains with, put together once."""

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddptrain import normalise
from ddptrain.datasets.dataset import DataSet, Samples
from ddptrain.ema import Ema
from ddptrain.errors import TrainError
from ddptrain.input.batches import Preparation
from ddptrain.input.choice import prepare_input
from ddptrain.models import build_model, pretrained
from ddptrain.optimizers import build_optimizer
from ddptrain.options import Options
from ddptrain.options.training import TrainingOptions
from ddptrain.place import Place
from ddptrain.precision import Precision, choose_precision
from ddptrain.recompute import recompute
from ddptrain.schedule import learning_rate
from ddptrain.strategy import compiled, wrap
from ddptrain.stream import num_batches
from ddptrain.tensorboard import Board, open_board
from ddptrain.world import World
from ddpwire.exits import Exit


class Stateful(Protocol):
    """What can be saved and loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take over a state."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, as a rank sees it. ``ddp`` is the model as it is trained, ``model`` the same without a wrapper."""

    options: Options
    world: World
    data: DataSet
    preparation: Preparation  # of training images
    precision: Precision
    model: nn.Module
    fresh: tuple[str, ...]  # the model's parts that pretrained weights did not fill
    ddp: nn.Module
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    board: Board  # TensorBoard's scalars
    batch_size: int  # over all ranks

    @property
    def train(self) -> Samples:
        """What is learned from."""
        return self.data.train

    @property
    def test(self) -> Samples:
        """What is held out."""
        return self.data.test

    @property
    def evaluated(self) -> nn.Module:
        """The model that counts in the end."""
        return self.model if self.ema is None else self.ema.model

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps; the last one may have a smaller batch."""
        return num_batches(len(self.train), self.batch_size)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self.options.training.epochs * self.steps_per_epoch

    @property
    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds, by name: all that has a state besides the step."""
        parts: dict[str, Stateful | None] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "ema": self.ema,
            "scaler": self.precision.scaler,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def lr(self, step: int) -> float:
        """The learning rate of step number ``step`` from 0."""
        return learning_rate(
            self.options.optimizer,
            ranks=self.world.place.size,
            step=step,
            num_steps=self.num_steps,
            steps_per_epoch=self.steps_per_epoch,
        )


def global_batch_size(options: TrainingOptions, place: Place) -> int:
    """Samples an optimizer step over all ranks. Raises TrainError."""
    if options.batch_size_per_rank:
        return options.batch_size_per_rank * place.size
    if options.batch_size < place.size:
        raise TrainError(
            Exit.CONFIG,
            f"--batch-size {options.batch_size} is less than one image for each of {place.size} ranks: "
            f"give at least {place.size}, or fewer ranks",
        )
    return options.batch_size


def prepare(options: Options, world: World, data: DataSet, *, batch_size: int) -> Job:
    """Model, optimizer and input on the device; the weights are the seed's. Raises TrainError."""
    precision = choose_precision(options.machine, world.device)
    torch.manual_seed(options.training.seed)
    how = options.model
    model = build_model(how.name, data.shape, stem=how.stem, norm=how.norm)
    fresh = pretrained.load(model, how) if how.pretrained else ()
    model = model.to(world.device, precision.weights)
    if options.machine.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if how.recompute:
        recompute(model)
    ema = Ema(model, options.training.ema) if options.training.ema else None
    seen = normalise.of_imagenet(data.shape.channels) if how.pretrained else normalise.of_images(data.train.images_NHWC)
    return Job(
        options=options,
        world=world,
        data=data,
        preparation=prepare_input(
            options, data, world, seen.to(world.device, precision.compute), batch_size=batch_size
        ),
        precision=precision,
        model=model,
        fresh=fresh,
        ddp=compiled(wrap(model, options.ranks, world), options.machine.compile),
        optimizer=build_optimizer(model, options.optimizer),
        ema=ema,
        board=open_board(options.training.tensorboard, world.place),
        batch_size=batch_size,
    )


def fingerprint(state: dict[str, Tensor]) -> str:
    """16 hex digits that tell whether two models are the same, bit for bit: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
