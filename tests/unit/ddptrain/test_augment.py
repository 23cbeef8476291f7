"""Which samples a batch has, and what a model sees of one, on any number of ranks and in a test."""

from itertools import pairwise

import pytest
import torch
from tests.messages import refused
from torch.nn import functional

from ddptrain import train_loop
from ddptrain.config import parse_options
from ddptrain.data import sampling
from ddptrain.data.augment import lay_out, num_bytes_laid_out
from ddptrain.data.datasets import SOURCES
from ddptrain.data.sampling import batches, epoch_order, num_batches, sample_hash, shard_of
from ddptrain.distributed import RankInfo, World
from ddptrain.errors import TrainError
from ddptrain.train_loop import _test_views, evaluate
from ddptrain.training_state import TrainingState, build_training_state

CPU = torch.device("cpu")
SYNTHETIC = ("--data=synthetic", "--synthetic-samples=64", "--synthetic-shape=3x12x12", "--batch-size=20")


def state(*arguments: str, rank: int = 0, size: int = 1) -> TrainingState:
    options = parse_options([*SYNTHETIC, *arguments], {})
    world = World(rank_info=RankInfo(rank=rank, size=size), device=CPU, backend="gloo", data_group=None)
    data = SOURCES["synthetic"].load(options.data, 0)
    return build_training_state(options, world, data, batch_size=options.training.batch_size)


def test_shifts_are_crops_of_the_padded_image_and_all_of_them_occur() -> None:
    image = torch.arange(1, 17, dtype=torch.uint8).view(1, 4, 4, 1)
    pixels = lay_out(image, crop_px=4, shift_px=1, mirrored=False)
    top, left_px = sampling.crop_offset(sample_hash(torch.arange(500), seed=0, epoch=0), pixels.choices)
    shifted = pixels.crops(torch.zeros(500, dtype=torch.int64), top, left_px, None)
    padded = functional.pad(image[0, :, :, 0], (1, 1, 1, 1))
    crops = {tuple(padded[y : y + 4, x : x + 4].flatten().tolist()) for y in range(3) for x in range(3)}
    assert {tuple(crop.flatten().tolist()) for crop in shifted} == crops


def test_alternate_flip_mirrors_each_image_in_every_second_epoch() -> None:
    plain, given = state("--flip", "--no-augment"), state("--alternate-flip")
    index = torch.arange(64)
    images = plain.batch_builder.batch(index, epoch=0).inputs
    mirrored = [given.batch_builder.batch(index, epoch=epoch).inputs.eq(images).flatten(1).all(1) for epoch in range(4)]
    assert all(torch.equal(before, ~after) for before, after in pairwise(mirrored))
    assert 16 < int(mirrored[0].sum()) < 48


@pytest.mark.parametrize("flag", ["--shift", "--cutout"])
def test_a_change_that_leaves_nothing_of_an_image_is_refused(flag: str) -> None:
    with refused(TrainError, "12x12", "0", "11", code=78):
        state(f"{flag}=12")
    state(f"{flag}=12", "--no-augment")
    state(f"{flag}=11")


def test_about_half_are_mirrored_and_it_is_the_same_with_and_without_kept_mirror_images() -> None:
    images = torch.randint(0, 256, (1000, 6, 6, 3), dtype=torch.uint8)
    bits = sample_hash(torch.arange(1000), seed=0, epoch=0)
    index, flips = torch.arange(1000), sampling.is_mirrored(bits)
    kept, made = (lay_out(images, crop_px=6, shift_px=2, mirrored=mirrored) for mirrored in (True, False))
    assert [len(kept.squares_MHWC), len(made.squares_MHWC)] == [2000, 1000]
    assert kept.squares_MHWC.numel() == num_bytes_laid_out(images, shift_px=2, mirrored=True)
    top, left_px = sampling.crop_offset(bits, 5)
    assert torch.equal(kept.crops(index, top, left_px, flips), made.crops(index, top, left_px, flips))
    plain = made.crops(index, top, left_px, None)
    mirrored = (made.crops(index, top, left_px, flips) == plain.flip(2)).flatten(1).all(1)
    assert torch.equal(mirrored, flips.bool())
    assert 440 < int(mirrored.sum()) < 560


ALL = ("--alternate-flip", "--reflect", "--shift=2", "--mixup=0.4", "--cutmix=1", "--cutout=3", "--erase=0.5")


def test_a_sample_is_changed_the_same_way_on_every_rank() -> None:
    whole = state(*ALL).batch_builder
    batch = epoch_order(64, seed=0, epoch=3)[:20]
    at_once = whole.batch(batch, epoch=3)
    shares = [shard_of(batch, rank=rank, shares=(1, 1, 1)).indices_N for rank in range(3)]
    parts = [state(*ALL, rank=rank, size=3).batch_builder.batch(shares[rank], epoch=3) for rank in range(3)]
    assert torch.equal(torch.cat([part.inputs for part in parts]), at_once.inputs)
    assert torch.equal(torch.cat([part.own_B for part in parts]), at_once.own_B)
    assert not torch.equal(whole.batch(batch, epoch=4).inputs, at_once.inputs)


def test_without_changes_a_batch_is_the_images() -> None:
    plain = state("--no-augment", "--precision=fp32")
    batch = plain.batch_builder.batch(torch.arange(20), epoch=0)
    images = plain.data.train.images_NHWC[:20].permute(0, 3, 1, 2).float()
    back = (batch.inputs - plain.batch_builder.normalise.offset) / plain.batch_builder.normalise.scale
    assert torch.allclose(back.float(), images, atol=1e-2)
    assert batch.inputs.is_contiguous(memory_format=torch.channels_last)


def test_an_epoch_is_a_permutation_of_its_seed_and_number_and_a_later_start_sees_the_rest_of_it() -> None:
    order = epoch_order(1003, seed=3, epoch=5)
    assert torch.equal(order.sort().values, torch.arange(1003))
    assert torch.equal(order, epoch_order(1003, seed=3, epoch=5))
    assert not torch.equal(order, epoch_order(1003, seed=3, epoch=6))
    assert not torch.equal(order, epoch_order(1003, seed=4, epoch=5))
    whole = list(batches(order, 100, first=0))
    assert ([len(batch) for batch in whole], num_batches(1003, 100)) == ([100] * 10 + [3], 11)
    assert all(torch.equal(a, b) for a, b in zip(whole[4:], batches(order, 100, first=4), strict=True))


@pytest.mark.parametrize(("batch", "world", "lengths"), [(10, 3, [4, 3, 3]), (10, 1, [10]), (3, 4, [1, 1, 1, 0])])
def test_shares_are_the_batch_once_and_weigh_as_its_mean(batch: int, world: int, lengths: list[int]) -> None:
    samples = torch.arange(100, 100 + batch)
    shares = [shard_of(samples, rank=rank, shares=(1,) * world) for rank in range(world)]
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


LR_SHARE = 0.01  # of the published learning rates, which are for batches of 1,000 images and more


def build(recipe: str, *, size_px: int, batch_size: int, epochs: int, steps: int) -> TrainingState:
    """Build a training on synthetic images."""
    lr = parse_options([f"--recipe={recipe}"], {}).optimizer.lr * LR_SHARE
    shape, samples = f"--synthetic-shape=3x{size_px}x{size_px}", f"--synthetic-samples={batch_size * steps}"
    data = ("--data=synthetic", shape, samples)
    sizes = (f"--batch-size={batch_size}", f"--epochs={epochs}", f"--lr={lr}", "--precision=fp64")
    options = parse_options([f"--recipe={recipe}", *data, *sizes], {})
    world = World(rank_info=RankInfo(), device=torch.device("cpu"), backend="gloo", data_group=None)
    return build_training_state(options, world, SOURCES["synthetic"].load(options.data, 0), batch_size=batch_size)


def test_six_views_of_a_test_image_are_weighted_as_published() -> None:
    images = torch.rand(2, 3, 5, 5)
    padded = functional.pad(images, (1,) * 4, "reflect")
    moved = (images, padded[:, :, :5, :5], padded[:, :, 2:, 2:])
    expected = [view for image in moved for view in (image, image.flip(3))]
    views = _test_views(images, parse_options(["--recipe=cifar10-94"], {}).training)
    assert [weight for weight, _ in views] == [0.25, 0.25, 0.125, 0.125, 0.125, 0.125]
    assert all(torch.equal(view, wanted) for (_, view), wanted in zip(views, expected, strict=True))


def test_the_loss_of_a_test_is_that_of_the_mean_logits() -> None:
    state = build("cifar10-94", size_px=17, batch_size=8, epochs=1, steps=2)
    evaluation, test = evaluate(state), state.data.test
    state.model.eval()
    with torch.no_grad():
        images = state.batch_builder.normalise(test.images_NHWC)
        logits = sum(weight * state.model(view) for weight, view in _test_views(images, state.options.training))
    loss = functional.cross_entropy(torch.as_tensor(logits), test.labels_N).item()
    assert evaluation.loss == pytest.approx(loss, rel=1e-6)
    assert evaluation.num_predicted == len(test)


@pytest.mark.parametrize("balance", ["1:9", "9:1"])
def test_ranks_with_unequal_shares_evaluate_each_test_sample_once(
    balance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_loop, "MAX_EVAL_IMAGES", 4)
    monkeypatch.setattr(train_loop, "sum_over_ranks", lambda _, values: values)
    states = [state(f"--balance={balance}", "--no-augment", rank=rank, size=2) for rank in (0, 1)]
    assert sum(evaluate(each).num_predicted for each in states) == len(states[0].data.test)
