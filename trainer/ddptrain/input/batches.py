# ruff: noqa: N803, N806, N815 - tensors carry their shape in their name
"""A rank's part of a batch, ready for the model. All that is random in it is a function of (seed, epoch, sample)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ddptrain.input import boxes, draws
from ddptrain.input.mixing import Mixing, mix, partners
from ddptrain.input.pixels import Pixels
from ddptrain.normalise import Normalisation
from ddptrain.stream import sample_hash

Mark = Callable[[str], None]  # the end of a phase of a step


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Images and what they show. A mixed image shows ``others_B`` too, and its own label for ``own_B`` of it."""

    images_BCHW: Tensor
    labels_B: Tensor
    others_B: Tensor | None = None
    own_B: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Samples as they are: those at ``index_B`` of ``pixels``."""

    pixels: Pixels
    index_B: Tensor
    labels_B: Tensor


class Feed(Protocol):
    """Where samples come from."""

    @property
    def told(self) -> str:
        """In the log: where that is."""

    def fetch(self, indices_B: Tensor, *, epoch: int, mark: Mark) -> Fetched:
        """Samples of the training set, on the device."""

    def rewind(self) -> None:
        """The next ones may be of any batch."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What is done to training images, the data set's own part included."""

    shift: bool  # crops begin anywhere, not in the middle
    flip: bool
    cutout_px: int
    erase: float
    mixing: Mixing | None


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How samples become a batch."""

    feed: Feed
    changes: Changes
    normalise: Normalisation
    seed: int
    num_samples: int

    def batch(self, indices_B: Tensor, *, epoch: int, mark: Mark = lambda _: None) -> Batch:
        """The batch of these samples. ``mark`` is told at the end of what is not ``data``, such as ``h2d``."""
        bits_B = sample_hash(indices_B, seed=self.seed, epoch=epoch)
        fetched = self.feed.fetch(self.wanted(indices_B, epoch=epoch), epoch=epoch, mark=mark)
        count = len(indices_B)
        images_BCHW = self._images(fetched.pixels, fetched.index_B[:count], bits_B)
        batch = Batch(images_BCHW=images_BCHW, labels_B=fetched.labels_B[:count])
        if self.changes.mixing is not None:
            other_bits_B = sample_hash(partners(bits_B, self.num_samples), seed=self.seed, epoch=epoch)
            others_BCHW = self._images(fetched.pixels, fetched.index_B[count:], other_bits_B)
            mixed, own_B = mix(self.changes.mixing, images_BCHW, others_BCHW, bits_B)
            batch = Batch(images_BCHW=mixed, labels_B=batch.labels_B, others_B=fetched.labels_B[count:], own_B=own_B)
        return self._blanked(batch, bits_B)

    def wanted(self, indices_B: Tensor, *, epoch: int) -> Tensor:
        """The samples that a batch needs: its own, then those that they are mixed with."""
        if self.changes.mixing is None:
            return indices_B
        bits_B = sample_hash(indices_B, seed=self.seed, epoch=epoch)
        return torch.cat([indices_B, partners(bits_B, self.num_samples)])

    def _images(self, pixels: Pixels, index_B: Tensor, bits_B: Tensor) -> Tensor:
        flipped_B = draws.mirrored(bits_B) if self.changes.flip else None
        if self.changes.shift and pixels.choices > 1:
            top_B, left_B = draws.offset(bits_B, pixels.choices)
        else:
            top_B = left_B = torch.full_like(index_B, (pixels.choices - 1) // 2)
        return self.normalise(pixels.crops(index_B, top_B, left_B, flipped_B))

    def _blanked(self, batch: Batch, bits_B: Tensor) -> Batch:
        """With rectangles of the mean colour in it."""
        images, size_px = batch.images_BCHW, batch.images_BCHW.shape[2]
        if self.changes.cutout_px:
            images = images.masked_fill(boxes.cutout(bits_B, self.changes.cutout_px, size_px), 0)
        if self.changes.erase:
            images = images.masked_fill(boxes.erased(bits_B, self.changes.erase, size_px), 0)
        if images is batch.images_BCHW:
            return batch
        return Batch(images_BCHW=images, labels_B=batch.labels_B, others_B=batch.others_B, own_B=batch.own_B)
