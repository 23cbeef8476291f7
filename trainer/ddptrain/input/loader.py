# ruff: noqa: N803, N806 - tensors carry their shape in their name
"""Samples read by worker processes, a few batches ahead, for sets that do not fit on the device.

The workers know nothing of chance: they are told which samples to read, in the order of the stream.
"""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddptrain.datasets.dataset import Samples
from ddptrain.input.batches import Fetched, Mark
from ddptrain.input.pixels import lay_out

PRELOAD = ["numpy", "torch", "torch.utils.data"]  # imported once, by the server that forks the workers

# What a rank trains in an epoch, from the batch on that holds a sample first: the samples that each batch needs.
Plan = Callable[[int, int], Iterable[Tensor]]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Samples by their numbers, many at once. A worker opens a cache's file itself; other images it shares."""

    def __init__(self, samples: Samples, alive: Connection) -> None:
        self._alive = alive
        self._watched = False
        self._file: Path | None = samples.file
        self._images_NHWC = None if samples.file else samples.images_NHWC.share_memory_()  # type: ignore[no-untyped-call]
        self._labels_N = samples.labels_N.share_memory_()  # type: ignore[no-untyped-call]

    def __getitem__(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        """The images and labels."""
        if not self._watched:
            self._watched = True
            threading.Thread(target=_end_with, args=(self._alive,), daemon=True, name="lifeline").start()
        if self._images_NHWC is None:
            self._images_NHWC = torch.from_numpy(np.load(str(self._file), mmap_mode="c"))
        return self._images_NHWC[indices_B], self._labels_N[indices_B]

    def __getstate__(self) -> dict[str, object]:
        """Without the pages of a file, which would be copied."""
        return {**self.__dict__, "_images_NHWC": None if self._file else self._images_NHWC}


def _end_with(alive: Connection) -> None:
    """End this worker with its rank, however that ends: its own parent is the server, which outlives a killed rank."""
    with contextlib.suppress(EOFError, OSError):
        alive.recv_bytes()
    os._exit(0)


class Order:
    """The sampler: what the workers are to read next. Set anew for each epoch."""

    def __init__(self) -> None:
        self.batches: Iterable[Tensor] = ()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class LoaderFeed:
    """A DataLoader that lives as long as the training."""

    def __init__(
        self,
        samples: Samples,
        *,
        crop_px: int,
        shift_px: int,
        plan: Plan,
        device: torch.device,
        workers: int,
        timeout_s: float,
        told: str,
    ) -> None:
        self.told = told
        self._crop_px, self._shift_px = crop_px, shift_px
        self._plan, self._device = plan, device
        self._order = Order()
        context = multiprocessing.get_context("forkserver")
        reader, self._alive = context.Pipe(duplex=False)  # its other end is nowhere but here
        context.set_forkserver_preload(PRELOAD)
        self._loader = DataLoader(
            Rows(samples, reader),
            sampler=self._order,
            batch_size=None,  # an item is a batch
            num_workers=workers,
            multiprocessing_context=context,
            persistent_workers=True,
            pin_memory=device.type == "cuda",
            timeout=timeout_s,
        )
        self._epoch: int | None = None
        self._read: Iterator[tuple[Tensor, Tensor]] = iter(())

    def fetch(self, indices_B: Tensor, *, epoch: int, mark: Mark) -> Fetched:
        """Samples of the training set: the next ones that the plan says, which ``indices_B`` are."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._order.batches = self._plan(epoch, int(indices_B[0]))
            self._read = iter(self._loader)
        read = next(self._read)
        mark("data")
        images_BHWC, labels_B = (part.to(self._device, non_blocking=True) for part in read)
        mark("h2d")
        pixels = lay_out(images_BHWC, crop_px=self._crop_px, shift_px=self._shift_px, mirrored=False)
        return Fetched(pixels=pixels, index_B=torch.arange(len(labels_B), device=self._device), labels_B=labels_B)

    def rewind(self) -> None:
        """The next ones may be of any batch."""
        self._epoch = None
