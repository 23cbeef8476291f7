# ruff: noqa: N803, N815 - tensors carry their shape in their name
"""Which samples are trained when, and by whom: pure functions of (seed, epoch, step), with no state to save.

Every number of ranks sees the same global batches in the same order. Shapes: N samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Share:
    """A rank's part of a global batch.

    ``weight`` is what the sum of its samples' losses is multiplied by, so that the mean over ranks of the gradients is
    the gradient of the batch's mean loss, however unevenly the batch was split.
    """

    indices_N: Tensor
    weight: float

    @property
    def num_samples(self) -> int:
        """Samples that count."""
        return len(self.indices_N) if self.weight else 0


def epoch_order(num_samples: int, *, seed: int, epoch: int) -> Tensor:
    """The epoch's permutation of the training samples, int64."""
    generator = torch.Generator().manual_seed(_mix(_mix(seed) + epoch) >> 1)
    return torch.randperm(num_samples, generator=generator)


def num_batches(num_samples: int, batch_size: int) -> int:
    """Batches of an epoch; the last one may be smaller."""
    return -(-num_samples // batch_size)


def batches(order_N: Tensor, batch_size: int, *, first: int) -> Iterator[Tensor]:
    """The epoch's global batches from number ``first`` on."""
    return iter(torch.split(order_N, batch_size)[first:])


def share_of(batch_N: Tensor, *, rank: int, world_size: int) -> Share:
    """A rank's share; shares differ by one sample at most.

    Where a last batch has fewer samples than there are ranks, a rank without any runs one with weight 0: it has to take
    part in the all-reduce.
    """
    indices = batch_N.tensor_split(world_size)[rank]
    if len(indices) == 0:
        return Share(indices_N=batch_N[:1], weight=0.0)
    return Share(indices_N=indices, weight=world_size / len(batch_N))


def sample_hash(indices_N: Tensor, *, seed: int, epoch: int) -> Tensor:
    """63 random bits for each sample of an epoch, as int64: the same on every device and in every torch."""
    return _finished(indices_N + _signed(_mix(_mix(seed) + epoch)))


def rehash(bits_N: Tensor, number: int) -> Tensor:
    """63 further bits for each, independent of those of every other ``number``."""
    return _finished(bits_N + _signed(_mix(number)))


def _finished(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser."""
    bits = (bits ^ _shift(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift(bits, 27)) * _signed(0x94D049BB133111EB)
    return (bits ^ _shift(bits, 31)) & (_MASK >> 1)


def _mix(value: int) -> int:
    """A step of SplitMix64 (https://prng.di.unimi.it/splitmix64.c)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _shift(bits: Tensor, count: int) -> Tensor:
    """A logical shift to the right: torch's keeps the sign."""
    return (bits >> count) & (_MASK >> count)


def _signed(value: int) -> int:
    """The int64 with the bits of ``value``."""
    return value - (1 << 64) if value >> 63 else value
