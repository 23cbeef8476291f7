# ruff: noqa: N803, N815 - tensors carry their shape in their name
"""The order of the samples, each rank's shard of a batch, and the random numbers for each sample.

The results depend only on the seed, the epoch and the step, so there is no state to save. The global batches and their
order are the same for any number of ranks. Shapes: N samples, B batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
# The ``number`` of each kind of random number; all are listed here so that each is used only once.
PARTNER, WHICH, BLEND, PASTE, PASTE_TOP, PASTE_LEFT = 1, 2, 3, 4, 5, 6
CUT_TOP, CUT_LEFT, ERASE, ERASE_AREA, ERASE_SHAPE, ERASE_TOP, ERASE_LEFT = 7, 8, 9, 10, 11, 12, 13
_TABLE_SIZE = 4096


@dataclass(frozen=True, kw_only=True)
class BatchShard:
    """A rank's shard of a global batch.

    A rank multiplies the sum of its samples' losses by ``weight``. Then the mean of the ranks' gradients is the
    gradient of the batch's mean loss, even if the shards differ in size.
    """

    indices_N: Tensor
    weight: float
    most: int  # number of samples in the largest shard

    @property
    def num_samples(self) -> int:
        """The number of samples that count towards the loss."""
        return len(self.indices_N) if self.weight else 0


def epoch_order(num_samples: int, *, seed: int, epoch: int) -> Tensor:
    """Return the order of the training samples in an epoch, as a permutation of their indices (int64)."""
    generator = torch.Generator().manual_seed(_mix(_mix(seed) + epoch) >> 1)
    return torch.randperm(num_samples, generator=generator)


def num_batches(num_samples: int, batch_size: int) -> int:
    """Return the number of batches in an epoch. The last batch may be smaller than the others."""
    return -(-num_samples // batch_size)


def batches(order_N: Tensor, batch_size: int, *, first: int) -> Iterator[Tensor]:
    """Iterate over the global batches of an epoch, beginning with batch ``first``."""
    return iter(torch.split(order_N, batch_size)[first:])


@lru_cache(maxsize=8)
def shard_sizes(num_samples: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """Divide samples among the ranks in proportion to their shares, to the nearest sample (largest remainders).

    Equal shares differ by at most one sample, and the first ranks have the larger ones, as in Tensor.tensor_split.
    """
    sizes = [num_samples * share // sum(shares) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: -(num_samples * shares[rank] % sum(shares)))
    for rank in by_remainder[: num_samples - sum(sizes)]:
        sizes[rank] += 1
    return tuple(sizes)


def shard_of(batch_N: Tensor, *, rank: int, shares: tuple[int, ...]) -> BatchShard:
    """Return a rank's shard of a batch. ``shares`` has each rank's share; see `shard_sizes`.

    If a batch has too few samples, some ranks have none. Such a rank gets one sample with weight 0, because every rank
    must take part in the all-reduce.
    """
    sizes = shard_sizes(len(batch_N), shares)
    if not sizes[rank]:
        return BatchShard(indices_N=batch_N[:1], weight=0.0, most=max(sizes))
    first = sum(sizes[:rank])
    shard = batch_N[first : first + sizes[rank]]
    return BatchShard(indices_N=shard, weight=len(shares) / len(batch_N), most=max(sizes))


def seed_step(device: torch.device, *, seed: int, step: int, rank: int) -> None:
    """Seed torch's random generators, which dropout uses, for one optimizer step of one rank.

    So a step uses the same random numbers whether or not the training was restarted. Different ranks and steps use
    different numbers.
    """
    bits = _mix(_mix(_mix(seed) + step) + rank) >> 1
    torch.default_generator.manual_seed(bits)
    if device.type == "cuda":
        torch.cuda.manual_seed(bits)


def sample_hash(indices_N: Tensor, *, seed: int, epoch: int) -> Tensor:
    """Return 63 random bits for each sample of an epoch (int64), the same on every device and torch version."""
    return _finished(indices_N + _signed(_mix(_mix(seed) + epoch)))


def rehash(bits_N: Tensor, number: int) -> Tensor:
    """Return 63 other random bits for each sample. The bits for different values of ``number`` are independent."""
    return _finished(bits_N + _signed(_mix(number)))


def _finished(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift(bits, 27)) * _signed(0x94D049BB133111EB)
    return (bits ^ _shift(bits, 31)) & (_MASK >> 1)


def _mix(value: int) -> int:
    """Apply one step of SplitMix64 (https://prng.di.unimi.it/splitmix64.c)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _shift(bits: Tensor, count: int) -> Tensor:
    """Shift right without extending the sign, unlike torch's shift."""
    return (bits >> count) & (_MASK >> count)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def crop_offset(bits_B: Tensor, choices: int) -> tuple[Tensor, Tensor]:
    """Return the top and the left offset of each crop. Each offset is from 0 to ``choices`` - 1."""
    return (bits_B & 0xFFFFF) % choices, ((bits_B >> 20) & 0xFFFFF) % choices


def is_mirrored(bits_B: Tensor) -> Tensor:
    """Return 1 for about half of the samples, and 0 for the rest."""
    return (bits_B >> 60) & 1


def uniform(bits_B: Tensor, number: int) -> Tensor:
    """Return uniform random numbers in [0, 1), float32. ``number`` is one of the constants of this module."""
    return (rehash(bits_B, number) >> 39).float() / (1 << 24)


def beta_table(alpha: float) -> Tensor:
    """Return the quantiles of Beta(alpha, alpha) up to its median, at equal steps of probability.

    The density is integrated over s = x^alpha, because the density of s has no pole at 0.
    """
    s = torch.linspace(0, 0.5**alpha, 64 * _TABLE_SIZE, dtype=torch.float64)
    x = s ** (1 / alpha)
    area = torch.cumulative_trapezoid((1 - x) ** (alpha - 1), s)
    probability = torch.cat([torch.zeros(1, dtype=torch.float64), area / area[-1]])
    wanted = torch.linspace(0, 1, _TABLE_SIZE + 1, dtype=torch.float64)
    return x[torch.searchsorted(probability, wanted).clamp(max=len(x) - 1)].float()


def beta(uniform_B: Tensor, table: Tensor) -> Tensor:
    """Return random numbers from Beta(alpha, alpha), given uniform random numbers and the result of ``beta_table``."""
    upper = uniform_B >= 0.5
    folded = torch.where(upper, 1 - uniform_B, uniform_B) * 2
    low = table[(folded * _TABLE_SIZE).long().clamp(max=_TABLE_SIZE)]
    return torch.where(upper, 1 - low, low)
