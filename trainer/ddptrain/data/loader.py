# ruff: noqa: N803, N806, N815 - tensors carry their shape in their name
"""Builds the batches of a rank. Samples reach the device all at once if they fit, otherwise from worker processes."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddptrain.config import AugmentationOptions, Options
from ddptrain.data import sampling
from ddptrain.data.augment import (
    Batch,
    Mark,
    Normalisation,
    Pixels,
    erase_mask,
    lay_out,
    mix_images,
    num_bytes_laid_out,
    square_mask,
)
from ddptrain.data.base import ImageDataset, Samples, format_bytes, free_bytes
from ddptrain.data.sampling import BatchShard, batches, beta_table, epoch_order
from ddptrain.distributed import World
from ddptrain.errors import TrainError, config_error
from ddpwire.exits import Exit

MAX_FREE_MEMORY_USED = 0.4  # share of the free memory; the model is allocated later
WORKER_CHECK_S = 5.0
PRELOAD = ["numpy", "torch", "torch.utils.data"]  # imported once, by the workers' fork server

# (epoch, first sample) -> the samples that each batch of the rank needs, starting at the batch with that first sample.
FetchPlan = Callable[[int, int], Iterable[Tensor]]


@dataclass(frozen=True, kw_only=True)
class DeviceFeed:
    """A feed whose samples are all on the device."""

    pixels: Pixels
    labels_N: Tensor
    description: str

    def fetch(self, indices_B: Tensor, *, epoch: int, mark: Mark) -> tuple[Pixels, Tensor, Tensor]:  # noqa: ARG002 - LoaderFeed needs them
        """Return samples of the training set."""
        return self.pixels, indices_B, self.labels_N[indices_B]

    def rewind(self) -> None:
        """Do nothing, because batches can be fetched in any order."""


class SampleReader(Dataset[tuple[Tensor, Tensor]]):
    """Reads samples in a worker process.

    If the images are in a cache file, the worker maps this file into memory. Other images are in shared memory.
    """

    def __init__(self, samples: Samples) -> None:
        self._file: Path | None = samples.file
        self._images_NHWC = None if samples.file else samples.images_NHWC.share_memory_()  # type: ignore[no-untyped-call]
        self._labels_N = samples.labels_N.share_memory_()  # type: ignore[no-untyped-call]

    def __getitem__(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and labels of many samples."""
        if self._images_NHWC is None:
            self._images_NHWC = torch.from_numpy(np.load(str(self._file), mmap_mode="c"))
        return self._images_NHWC[indices_B], self._labels_N[indices_B]


def _exit_with_rank(_worker: int) -> None:
    """Exit when the rank ends. A worker is forked by the fork server, which does not end if the rank is killed."""
    rank = multiprocessing.parent_process()

    def wait() -> None:
        if rank is not None:
            rank.join()
        os._exit(0)

    threading.Thread(target=wait, daemon=True, name="lifeline").start()


class LoaderFeed:
    """A feed for samples that do not fit on the device. Worker processes read a few batches ahead.

    The feed is also the sampler of its DataLoader: it iterates over the batches of an epoch.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        crop: Callable[[Tensor], Pixels],
        plan: FetchPlan,
        device: torch.device,
        workers: int,
        timeout_s: float,
        description: str,
    ) -> None:
        self.description = description
        self._crop, self._plan, self._device = crop, plan, device
        self._batches: Iterable[Tensor] = ()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._loader = DataLoader(
            SampleReader(samples),
            sampler=self,
            batch_size=None,  # an item is a batch
            num_workers=workers,
            multiprocessing_context=context,
            persistent_workers=True,
            pin_memory=device.type == "cuda",
            worker_init_fn=_exit_with_rank,
            timeout=min(timeout_s, WORKER_CHECK_S),
        )
        self._timeout_s = timeout_s
        self._epoch: int | None = None
        self._read: Iterator[tuple[Tensor, Tensor]] = iter(())

    def fetch(self, indices_B: Tensor, *, epoch: int, mark: Mark) -> tuple[Pixels, Tensor, Tensor]:
        """Return the samples of the plan's next batch. ``indices_B`` must be the indices of these samples."""
        try:
            if epoch != self._epoch:
                self._epoch = epoch
                self._batches = self._plan(epoch, int(indices_B[0]))
                self._read = iter(self._loader)
            read = self._next()
        except (EOFError, ConnectionError, RuntimeError) as error:
            # A lost fork server raises the first two. Torch has no error type for a lost worker.
            if isinstance(error, RuntimeError) and "exited unexpectedly" not in str(error):
                raise
            raise TrainError(
                Exit.KILLED,
                "a worker process that reads images ended unexpectedly",
                hint="if it was killed for lack of memory, give the job more memory or fewer --workers",
                rank=None,
            ) from error
        mark("data")
        images_BHWC, labels_B = (part.to(self._device, non_blocking=True) for part in read)
        mark("h2d")
        return self._crop(images_BHWC), torch.arange(len(labels_B), device=self._device), labels_B

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._batches)

    def _next(self) -> tuple[Tensor, Tensor]:
        """Return the next batch.

        torch detects a lost worker only when the wait for a batch times out. So each wait is short, and this function
        waits again until ``timeout_s`` has passed.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return next(self._read)
            except RuntimeError as error:  # torch has no error type for a time-out
                if "timed out" not in str(error) or time.monotonic() > deadline:
                    raise

    def rewind(self) -> None:
        """Reset the feed. The next call of ``fetch`` may ask for any batch."""
        self._epoch = None


@dataclass(frozen=True, kw_only=True)
class BatchBuilder:
    """Builds the batches of a rank from samples."""

    feed: DeviceFeed | LoaderFeed
    options: AugmentationOptions  # with the data set's defaults
    mixup: Tensor | None  # see mix_images
    cutmix: Tensor | None
    normalise: Normalisation
    data: ImageDataset
    seed: int
    _bits: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, repr=False)  # of an epoch's samples

    def batch(self, indices_B: Tensor, *, epoch: int, mark: Mark = lambda _: None) -> Batch:
        """Return the batch of these samples. ``mark`` is called with the name of each phase that ends."""
        given, count, size_px = self.options, len(indices_B), self.data.shape.size_px
        bits_B, needed_B = self._random_bits(indices_B, epoch), self.needed(indices_B, epoch=epoch)
        pixels, index_B, labels_B = self.feed.fetch(needed_B, epoch=epoch, mark=mark)
        images = self._images(pixels, index_B[:count], indices_B, bits_B, epoch)
        others_B = own_B = None
        if self._is_mixed:
            partners_B, others_B = needed_B[count:], labels_B[count:]
            partner_bits_B = self._random_bits(partners_B, epoch)
            partners = self._images(pixels, index_B[count:], partners_B, partner_bits_B, epoch)
            images, own_B = mix_images(images, partners, bits_B, mixup=self.mixup, cutmix=self.cutmix)
        # 0 is the mean colour. Cutout: T. DeVries, G. Taylor 2017, https://arxiv.org/abs/1708.04552.
        if given.cutout:
            cut = square_mask(bits_B, (sampling.CUT_TOP, sampling.CUT_LEFT), given.cutout, size_px)
            images = images.masked_fill(cut, 0)
        if given.erase:
            images = images.masked_fill(erase_mask(bits_B, given.erase, size_px), 0)
        return Batch(inputs=images, labels_B=labels_B[:count], others_B=others_B, own_B=own_B)

    def test_batch(self, indices_B: Tensor) -> Batch:
        """Return consecutive samples of the test set: the centre crops of their images."""
        device, test, size_px = self.normalise.scale.device, self.data.test, self.data.shape.size_px
        first = (test.images_NHWC.shape[1] - size_px) // 2
        part, middle = slice(int(indices_B[0]), int(indices_B[-1]) + 1), slice(first, first + size_px)
        images_BHWC = test.images_NHWC[part, middle, middle].to(device)
        return Batch(inputs=self.normalise(images_BHWC), labels_B=test.labels_N[part].to(device))

    @property
    def _is_mixed(self) -> bool:
        return self.mixup is not None or self.cutmix is not None

    def needed(self, indices_B: Tensor, *, epoch: int) -> Tensor:
        """Return the indices of the samples that a batch needs: its own samples, then the samples to mix them with."""
        if not self._is_mixed:
            return indices_B
        partners_B = sampling.rehash(self._random_bits(indices_B, epoch), sampling.PARTNER) % len(self.data.train)
        return torch.cat([indices_B, partners_B])

    def _random_bits(self, indices_B: Tensor, epoch: int) -> Tensor:
        """Return `sampling.sample_hash`. It is computed once an epoch, because each batch would need 11 kernels."""
        key = epoch, indices_B.device
        if key not in self._bits:
            for other in [other for other in self._bits if other[0] and other[1] == indices_B.device]:
                del self._bits[other]
            samples_N = torch.arange(len(self.data.train), device=indices_B.device)
            self._bits[key] = sampling.sample_hash(samples_N, seed=self.seed, epoch=epoch)
        return self._bits[key][indices_B]

    def _images(self, pixels: Pixels, index_B: Tensor, samples_B: Tensor, bits_B: Tensor, epoch: int) -> Tensor:
        flipped_B = sampling.is_mirrored(bits_B) if self.options.flip else None
        if flipped_B is not None and self.options.alternate_flip:
            flipped_B = sampling.is_mirrored(self._random_bits(samples_B, 0)) ^ (epoch & 1)
        if self.options.augment and pixels.choices > 1:
            top_B, left_B = sampling.crop_offset(bits_B, pixels.choices)
        else:
            top_B = left_B = torch.full_like(index_B, (pixels.choices - 1) // 2)
        return self.normalise(pixels.crops(index_B, top_B, left_B, flipped_B))


def choose_augmentation(options: Options, data: ImageDataset) -> AugmentationOptions:
    """Return the augmentation of the training images, with the data set's defaults. Raises TrainError."""
    given, size_px = options.augmentation, data.shape.size_px
    sizes = {"--test-shift": options.training.test_shift}
    if given.augment:
        sizes |= {"--shift": given.shift or 0, "--cutout": given.cutout}
    for flag, given_px in sizes.items():
        if given_px >= size_px:
            message = f"{flag} {given_px} is too large for images of {size_px}x{size_px} pixels"
            raise config_error(f"{message}: expected 0 to {size_px - 1}")
    if not given.augment:
        return AugmentationOptions(augment=False, reflect=given.reflect)
    return replace(
        given,
        shift=data.shift_px if given.shift is None else given.shift,
        flip=data.flip or given.alternate_flip if given.flip is None else given.flip,
    )


def make_batch_builder(
    options: Options,
    data: ImageDataset,
    world: World,
    normalise: Normalisation,
    *,
    batch_size: int,
    shard_of: Callable[[Tensor], BatchShard],
) -> BatchBuilder:
    """Return the builder of batches. ``--input`` decides how samples reach the device. Raises TrainError.

    ``shard_of`` returns this rank's shard of a global batch.
    """
    augmentation, images_NHWC = choose_augmentation(options, data), data.train.images_NHWC
    shift_px = augmentation.shift or 0
    crop = partial(lay_out, crop_px=data.shape.size_px, shift_px=shift_px, reflect=augmentation.reflect)
    needed = [num_bytes_laid_out(images_NHWC, shift_px=shift_px, mirrored=twice) for twice in (False, True)]
    sharing = world.rank_info.local_world_size if world.device.type == "cpu" else 1
    available = MAX_FREE_MEMORY_USED * free_bytes(world.device) / sharing
    available -= data.test.images_NHWC.numel()
    fits = needed[0] <= available
    if options.data.input == "device" or (options.data.input == "auto" and fits):
        mirrored = bool(augmentation.flip) and needed[1] <= available
        pixels = crop(images_NHWC, mirrored=mirrored, device=world.device)
        description = f"{format_bytes(pixels.squares_MHWC.numel())} of images on the device"
        labels_N = data.train.labels_N.to(world.device)
        feed: DeviceFeed | LoaderFeed = DeviceFeed(pixels=pixels, labels_N=labels_N, description=description)
    else:
        workers = options.data.workers
        reason = "" if fits else f" ({format_bytes(needed[0])} do not fit on the device)"

        def plan(epoch: int, first: int) -> Iterable[Tensor]:
            order = epoch_order(len(data.train), seed=options.training.seed, epoch=epoch)
            at = int((order == first).nonzero()[0]) // batch_size
            for batch in batches(order, batch_size, first=at):
                yield batch_builder.needed(shard_of(batch).indices_N, epoch=epoch)

        feed = LoaderFeed(
            data.train,
            crop=partial(crop, mirrored=False),
            plan=plan,
            device=world.device,
            workers=workers,
            timeout_s=options.ranks.timeout_s,
            description=f"images loaded by {workers} {'worker' if workers == 1 else 'workers'} per rank{reason}",
        )
    mixup, cutmix = (
        beta_table(alpha).to(world.device) if alpha else None for alpha in (augmentation.mixup, augmentation.cutmix)
    )
    batch_builder = BatchBuilder(
        feed=feed,
        options=augmentation,
        mixup=mixup,
        cutmix=cutmix,
        normalise=normalise,
        data=data,
        seed=options.training.seed,
    )
    return batch_builder
