"""Everything that one rank trains with, put together once."""

import hashlib
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddptrain.datasets.dataset import DataSet, Normalisation, Samples, normalisation
from ddptrain.errors import TrainError
from ddptrain.models import build_model
from ddptrain.options import Options
from ddptrain.options.training import TrainingOptions
from ddptrain.place import Place
from ddptrain.schedule import learning_rate
from ddptrain.stream import num_batches
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
    train: Samples  # on the device, as ``test``
    test: Samples
    normalise: Normalisation
    model: nn.Module
    ddp: nn.Module
    optimizer: torch.optim.Optimizer
    batch_size: int  # over all ranks

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
        return {"model": self.model, "optimizer": self.optimizer}

    def lr(self, step: int) -> float:
        """The learning rate of step number ``step`` from 0."""
        how = self.options.optimizer
        peak = how.lr * (self.world.place.size if how.scale_lr else 1)
        return learning_rate(how.schedule, peak=peak, step=step, num_steps=self.num_steps)


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
    """Model, optimizer and data on the device; the weights are the seed's. Raises TrainError."""
    how = options.optimizer
    torch.manual_seed(options.training.seed)
    model = build_model(options.model.name, data.shape).to(world.device)
    return Job(
        options=options,
        world=world,
        data=data,
        train=data.train.to(world.device),
        test=data.test.to(world.device),
        normalise=normalisation(data.train.images_NCHW, world.device),
        model=model,
        ddp=distributed(model, world),
        optimizer=torch.optim.SGD(
            model.parameters(),
            lr=how.lr,
            momentum=how.momentum,
            weight_decay=how.weight_decay,
            nesterov=how.momentum > 0,
            fused=True,
        ),
        batch_size=batch_size,
    )


def distributed(model: nn.Module, world: World) -> nn.Module:
    """The model with its gradients averaged over the ranks; a world of one needs no wrapper."""
    if world.data_group is None:
        return model
    # For the weights of a convolution of one channel, whose memory is the same in both layouts.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    device_ids = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, process_group=world.data_group)


def fingerprint(state: dict[str, Tensor]) -> str:
    """16 hex digits that tell whether two models are the same, bit for bit: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
