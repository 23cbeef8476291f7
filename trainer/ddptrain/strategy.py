"""How one model is trained by many: DistributedDataParallel and its knobs, DataParallel to compare with, or alone."""

import warnings

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddptrain.errors import TrainError
from ddptrain.options import Options
from ddptrain.options.ranks import RankOptions
from ddptrain.place import Place
from ddptrain.world import World
from ddpwire.exits import Exit

_HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


def check_strategy(options: Options, place: Place) -> None:
    """Refuse what does not go together. Raises TrainError."""
    how = options.ranks
    if how.strategy != "ddp" and place.size > 1:
        raise TrainError(
            Exit.CONFIG, f"--strategy {how.strategy} is for one process, this is one of {place.size} ranks: give ddp"
        )
    if how.static_graph and options.training.accumulate > 1:
        raise TrainError(Exit.CONFIG, "--static-graph does not go with --accumulate: leave one of them out")


def wrap(model: nn.Module, how: RankOptions, world: World) -> nn.Module:
    """The model as it is trained; a world of one needs no wrapper. Raises TrainError."""
    if how.sync_bn:
        if world.device.type != "cuda":
            raise TrainError(Exit.CONFIG, "--sync-bn needs GPUs: on CPUs, --norm group does not depend on the batch")
        if world.data_group is not None:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model, world.data_group)  # type: ignore[no-untyped-call]
    if how.strategy == "dp":
        return DataParallel(model)
    return distributed(model, world, how) if world.data_group is not None else model


def distributed(model: nn.Module, world: World, how: RankOptions) -> nn.Module:
    """The model with its gradients averaged over the ranks."""
    # For the weights of a convolution of one channel, whose memory is the same in both layouts.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    ddp = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        process_group=world.data_group,
        bucket_cap_mb=how.bucket_mb,
        gradient_as_bucket_view=how.bucket_view,
        static_graph=how.static_graph,
    )
    if how.compress in _HOOKS:
        ddp.register_comm_hook(world.data_group, _HOOKS[how.compress])
    return ddp


def compiled(model: nn.Module, mode: str) -> nn.Module:
    """torch.compile's, in one of its modes; reduce-overhead takes CUDA graphs."""
    if mode == "off":
        return model
    module: nn.Module = torch.compile(model, mode=mode)  # type: ignore[assignment]
    return module
