# ruff: noqa: N806 - tensors carry their shape in their name
"""On which path samples go to the model: chosen by the room there is, and said."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ddptrain.datasets.dataset import DataSet
from ddptrain.errors import TrainError
from ddptrain.input.batches import Changes, Feed, Preparation
from ddptrain.input.device import DeviceFeed
from ddptrain.input.loader import LoaderFeed
from ddptrain.input.mixing import mixing
from ddptrain.input.pixels import bytes_laid_out, lay_out
from ddptrain.normalise import Normalisation
from ddptrain.options import Options
from ddptrain.room import free_bytes, told_size
from ddptrain.stream import batches, epoch_order, share_of
from ddptrain.world import World
from ddpwire.exits import Exit

SHARE_OF_ROOM = 0.4  # of what is free now: the model comes afterwards


def changes(options: Options, data: DataSet, device: torch.device) -> tuple[Changes, int]:
    """What is done to training images, and by how many pixels they are padded for it. Raises TrainError."""
    how, size_px = options.augmentation, data.shape.size_px
    for flag, given_px in (("--shift", how.shift or 0), ("--cutout", how.cutout)):
        if how.augment and given_px >= size_px:
            raise TrainError(
                Exit.CONFIG,
                f"{flag} {given_px}: of images of {size_px}x{size_px} nothing would be left; "
                f"0 to {size_px - 1} is allowed",
            )
    shift_px = data.augmentation.shift_px if how.shift is None else how.shift
    flip = data.augmentation.flip if how.flip is None else how.flip
    done = Changes(
        shift=how.augment,
        flip=how.augment and flip,
        cutout_px=how.cutout if how.augment else 0,
        erase=how.erase if how.augment else 0.0,
        mixing=mixing(how.mixup, how.cutmix, device) if how.augment else None,
    )
    return done, shift_px if how.augment else 0


def prepare_input(
    options: Options, data: DataSet, world: World, normalise: Normalisation, *, batch_size: int
) -> Preparation:
    """Samples on the device, or a loader for them, as ``--input`` says; auto: on the device where they fit."""
    done, shift_px = changes(options, data, world.device)
    images_NHWC, crop_px = data.train.images_NHWC, data.shape.size_px
    needed = [bytes_laid_out(images_NHWC, shift_px=shift_px, mirrored=twice) for twice in (False, True)]
    room = SHARE_OF_ROOM * free_bytes(world.device) / (world.place.local_size if world.device.type == "cpu" else 1)
    fits = needed[0] + data.test.num_bytes <= room
    feed: Feed
    if options.data.input == "device" or (options.data.input == "auto" and fits):
        mirrored = done.flip and needed[1] + data.test.num_bytes <= room
        pixels = lay_out(images_NHWC.to(world.device), crop_px=crop_px, shift_px=shift_px, mirrored=mirrored)
        told = f"{told_size(pixels.squares_MHWC.numel())} of images on the device"
        feed = DeviceFeed(pixels=pixels, labels_N=data.train.labels_N.to(world.device), told=told)
        return Preparation(
            feed=feed, changes=done, normalise=normalise, seed=options.training.seed, num_samples=len(data.train)
        )
    workers = options.data.workers
    why = "" if fits else f" ({told_size(needed[0])} do not fit on the device)"
    preparation: list[Preparation] = []  # the plan needs it, and it the feed

    def plan(epoch: int, first: int) -> Iterable[Tensor]:
        order = epoch_order(len(data.train), seed=options.training.seed, epoch=epoch)
        at = int((order == first).nonzero()[0]) // batch_size
        for batch in batches(order, batch_size, first=at):
            share = share_of(batch, rank=world.place.rank, world_size=world.place.size)
            yield preparation[0].wanted(share.indices_N, epoch=epoch)

    feed = LoaderFeed(
        data.train,
        crop_px=crop_px,
        shift_px=shift_px,
        plan=plan,
        device=world.device,
        workers=workers,
        timeout_s=options.ranks.timeout_s,
        told=f"images by {workers} loader {'worker' if workers == 1 else 'workers'} a rank{why}",
    )
    preparation.append(
        Preparation(
            feed=feed, changes=done, normalise=normalise, seed=options.training.seed, num_samples=len(data.train)
        )
    )
    return preparation[0]
