"""The stream is a function of (seed, epoch, step): every number of ranks sees the same batches."""

import pytest
import torch

from ddptrain.data.sampling import batches, epoch_order, num_batches, sample_hash, shard_of


def test_an_epoch_is_a_permutation_of_its_seed_and_number() -> None:
    order = epoch_order(1000, seed=3, epoch=5)
    assert torch.equal(order.sort().values, torch.arange(1000))
    assert torch.equal(order, epoch_order(1000, seed=3, epoch=5))
    assert not torch.equal(order, epoch_order(1000, seed=3, epoch=6))
    assert not torch.equal(order, epoch_order(1000, seed=4, epoch=5))


def test_a_later_start_sees_the_rest_of_the_same_batches() -> None:
    order = epoch_order(103, seed=0, epoch=0)
    whole = list(batches(order, 10, first=0))
    assert [len(batch) for batch in whole] == [10] * 10 + [3]
    assert num_batches(103, 10) == 11
    assert all(torch.equal(a, b) for a, b in zip(whole[4:], batches(order, 10, first=4), strict=True))


@pytest.mark.parametrize(("batch", "world", "lengths"), [(10, 3, [4, 3, 3]), (10, 1, [10]), (3, 4, [1, 1, 1, 0])])
def test_shares_are_the_batch_once_and_weigh_as_its_mean(batch: int, world: int, lengths: list[int]) -> None:
    samples = torch.arange(100, 100 + batch)
    shares = [shard_of(samples, rank=rank, world_size=world) for rank in range(world)]
    assert [shard.num_samples for shard in shares] == lengths
    assert torch.equal(torch.cat([shard.indices_N[: shard.num_samples] for shard in shares]), samples)
    assert all(len(shard.indices_N) > 0 for shard in shares)
    losses = torch.rand(100 + batch, dtype=torch.float64)
    averaged_by_ddp = sum(float(losses[shard.indices_N].sum()) * shard.weight for shard in shares) / world
    assert averaged_by_ddp == pytest.approx(float(losses[samples].mean()), rel=1e-12)


def test_a_hash_is_of_the_sample_wherever_it_stands() -> None:
    whole = sample_hash(torch.arange(10_000), seed=1, epoch=2)
    assert torch.equal(whole[[7, 9_000, 3]], sample_hash(torch.tensor([7, 9_000, 3]), seed=1, epoch=2))
    assert whole.min() >= 0
    assert whole.unique().numel() == 10_000
    assert not torch.equal(whole, sample_hash(torch.arange(10_000), seed=1, epoch=3))
    for bit in (0, 20, 40, 60, 62):
        assert 4_700 < int(((whole >> bit) & 1).sum()) < 5_300


def test_a_hash_never_changes_with_torch() -> None:
    """SplitMix64's finaliser, also reckoned in plain Python: a split of the digits hangs on it."""

    def mix(value: int, step: int = 0x9E3779B97F4A7C15) -> int:
        mask = (1 << 64) - 1
        value = (value + step) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    key = mix((mix(11) + 4) & ((1 << 64) - 1))
    expected = [mix((key + index) & ((1 << 64) - 1), step=0) & ((1 << 63) - 1) for index in range(5)]
    assert sample_hash(torch.arange(5), seed=11, epoch=4).tolist() == expected
