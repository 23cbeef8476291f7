"""What a model sees of a sample: a function of (seed, epoch, sample), on both paths and on any number of ranks."""

from typing import Any

import pytest
import torch
from tests.facts import assert_names
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ddptrain.config import parse_options
from ddptrain.data import augment, sampling
from ddptrain.data.augment import lay_out, make_mixing, mix_images, mixing_partners, num_bytes_laid_out
from ddptrain.data.sampling import epoch_order, sample_hash, shard_of
from ddptrain.distributed import RankInfo, World
from ddptrain.errors import TrainError
from ddptrain.main import SOURCES
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
    top, left = sampling.crop_offset(sample_hash(torch.arange(500), seed=0, epoch=0), pixels.choices)
    shifted = pixels.crops(torch.zeros(500, dtype=torch.int64), top, left, None)
    padded = functional.pad(image[0, :, :, 0], (1, 1, 1, 1))
    crops = {tuple(padded[y : y + 4, x : x + 4].flatten().tolist()) for y in range(3) for x in range(3)}
    assert {tuple(one.flatten().tolist()) for one in shifted} == crops


@pytest.mark.parametrize("flag", ["--shift", "--cutout"])
def test_a_change_that_leaves_nothing_of_an_image_is_refused(flag: str) -> None:
    with pytest.raises(TrainError) as error:
        state(f"{flag}=12")
    assert error.value.code == 78
    assert_names(error.value, "12x12", "0", "11")
    state(f"{flag}=12", "--no-augment")
    state(f"{flag}=11")


def test_about_half_are_mirrored_and_it_is_the_same_with_and_without_kept_mirror_images() -> None:
    images = torch.randint(0, 256, (1000, 6, 6, 3), dtype=torch.uint8)
    bits = sample_hash(torch.arange(1000), seed=0, epoch=0)
    index, flips = torch.arange(1000), sampling.is_mirrored(bits)
    kept, made = (lay_out(images, crop_px=6, shift_px=2, mirrored=mirrored) for mirrored in (True, False))
    assert [len(kept.squares_MHWC), len(made.squares_MHWC)] == [2000, 1000]
    assert kept.squares_MHWC.numel() == num_bytes_laid_out(images, shift_px=2, mirrored=True)
    top, left = sampling.crop_offset(bits, 5)
    assert torch.equal(kept.crops(index, top, left, flips), made.crops(index, top, left, flips))
    plain = made.crops(index, top, left, None)
    mirrored = (made.crops(index, top, left, flips) == plain.flip(2)).flatten(1).all(1)
    assert torch.equal(mirrored, flips.bool())
    assert 440 < int(mirrored.sum()) < 560


class Held(TorchDispatchMode):
    """The most bytes that the tensors made within held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storage = result.untyped_storage()
        self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for one, size in self._made.values() if not one.expired()))
        return result


@pytest.mark.parametrize(("shift_px", "mirrored"), [(2, True), (0, True), (2, False), (0, False)])
def test_laying_out_holds_no_more_than_is_said_and_the_images(
    shift_px: int, mirrored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = torch.randint(0, 256, (1000, 6, 7, 3), dtype=torch.uint8)
    monkeypatch.setattr(augment, "MAX_PART_BYTES", 64 * images[0].numel())
    with Held() as held:
        laid_out = lay_out(images, crop_px=6, shift_px=shift_px, mirrored=mirrored).squares_MHWC
    expected = functional.pad(images, (0, 0, shift_px, shift_px, shift_px, shift_px))
    assert torch.equal(laid_out, torch.cat([expected, expected.flip(2)]) if mirrored else expected)
    needed = num_bytes_laid_out(images, shift_px=shift_px, mirrored=mirrored)
    assert held.most - images.numel() <= needed + 3 * augment.MAX_PART_BYTES  # the images themselves count as well


def test_larger_squares_are_cropped_in_the_middle_for_a_test() -> None:
    images = torch.randint(0, 256, (3, 10, 10, 3), dtype=torch.uint8)
    middles = lay_out(images, crop_px=6, shift_px=0, mirrored=False).centre_crops(torch.tensor([2, 0]))
    assert torch.equal(middles, images[[2, 0], 2:8, 2:8])


def test_a_cutout_is_a_square_of_its_side_and_an_erased_part_lies_inside() -> None:
    bits = sample_hash(torch.arange(2000), seed=0, epoch=0)
    cut = augment.square_mask(bits, (sampling.CUT_TOP, sampling.CUT_LEFT), 4, 16)[:, 0]
    assert cut.shape == (2000, 16, 16)
    assert cut.flatten(1).sum(1).max() == 16
    assert cut.flatten(1).sum(1).min() >= 4  # in a corner a quarter of it is left
    assert cut.float().mean(0).min() > 0  # every pixel is cut out some time
    erased = augment.erase_mask(bits, 0.5, 16)[:, 0].flatten(1).sum(1)
    assert 900 < int((erased > 0).sum()) < 1100
    areas = erased[erased > 0] / 16**2
    assert 0.01 < areas.min() < 0.04 < 0.3 < areas.max() < 0.4


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_beta_is_drawn_as_by_torch(alpha: float) -> None:
    drawn = sampling.beta((torch.arange(20_000) + 0.5) / 20_000, sampling.beta_table(alpha))
    torch.manual_seed(0)
    expected = torch.distributions.Beta(alpha, alpha).sample((2_000_000,))
    wanted = torch.tensor([0.05, 0.25, 0.5, 0.6, 0.9])
    assert torch.allclose(drawn.quantile(wanted), expected.quantile(wanted), atol=0.01)


def test_mixed_images_are_as_much_of_each_other_as_their_labels_say() -> None:
    bits = sample_hash(torch.arange(400), seed=0, epoch=0)
    ones, zeros = torch.ones(400, 1, 16, 16), torch.zeros(400, 1, 16, 16)
    for alphas in ((0.5, 0.0), (0.0, 1.0), (0.5, 1.0)):
        how = make_mixing(*alphas, CPU)
        assert how is not None
        images, own = mix_images(how, ones, zeros, bits)
        assert torch.allclose(images.mean((1, 2, 3)), own, atol=1e-5)
        assert 0.4 < float(own.mean()) < 0.75
        pasted = ((images == 0) | (images == 1)).flatten(1).all(1).float().mean()
        assert (float(pasted) > 0.9) if alphas[0] == 0 else (float(pasted) < 0.7)
    assert make_mixing(0, 0, CPU) is None
    drawn = mixing_partners(bits, 10)
    assert drawn.unique().tolist() == list(range(10))


ALL = ("--flip", "--shift=2", "--mixup=0.4", "--cutmix=1", "--cutout=3", "--erase=0.5")


@pytest.mark.parametrize("augmentations", [(), ("--flip", "--shift=2"), ALL], ids=["none", "flip", "all"])
def test_both_paths_give_the_same_batches(augmentations: tuple[str, ...]) -> None:
    device, loader = state(*augmentations, "--input=device"), state(*augmentations, "--input=loader", "--workers=1")
    assert device.batch_builder.feed.description.startswith("0.1 MB" if "--flip" in augmentations else "0.0 MB")
    assert_names(loader.batch_builder.feed.description, "1")
    for epoch, first in ((0, 0), (1, 1)):  # the second one is begun in its middle
        order = epoch_order(64, seed=0, epoch=epoch)
        for batch in torch.split(order, 20)[first:]:
            one, other = (each.batch_builder.batch(batch, epoch=epoch) for each in (device, loader))
            assert torch.equal(one.inputs, other.inputs)
            assert torch.equal(one.labels_B, other.labels_B)
            assert (one.own_B is None) == ("--mixup=0.4" not in augmentations)
            if one.own_B is not None and one.others_B is not None:
                assert torch.equal(one.own_B, other.own_B)
                assert torch.equal(one.others_B, other.others_B)


def test_a_sample_is_changed_the_same_way_on_every_rank() -> None:
    whole = state(*ALL).batch_builder
    batch = epoch_order(64, seed=0, epoch=3)[:20]
    at_once = whole.batch(batch, epoch=3)
    shares = [shard_of(batch, rank=rank, world_size=3).indices_N for rank in range(3)]
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
