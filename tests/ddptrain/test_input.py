"""What a model sees of a sample: a function of (seed, epoch, sample), on both paths and on any number of ranks."""

import pytest
import torch
from torch.nn import functional

from ddptrain.errors import TrainError
from ddptrain.input import boxes, draws
from ddptrain.input.mixing import mix, mixing, partners
from ddptrain.input.pixels import bytes_laid_out, lay_out
from ddptrain.job import Job, prepare
from ddptrain.main import SOURCES
from ddptrain.options import parse
from ddptrain.place import Place
from ddptrain.stream import epoch_order, sample_hash, share_of
from ddptrain.world import World

CPU = torch.device("cpu")
SYNTHETIC = ("--data=synthetic", "--synthetic-samples=64", "--synthetic-shape=3x12x12", "--batch-size=20")


def job(*arguments: str, rank: int = 0, size: int = 1) -> Job:
    options = parse([*SYNTHETIC, *arguments], {})
    world = World(place=Place(rank=rank, size=size), device=CPU, backend="gloo", data_group=None)
    data = SOURCES["synthetic"].load(options.data, 0)
    return prepare(options, world, data, batch_size=options.training.batch_size)


def test_shifts_are_crops_of_the_padded_image_and_all_of_them_occur() -> None:
    image = torch.arange(1, 17, dtype=torch.uint8).view(1, 4, 4, 1)
    pixels = lay_out(image, crop_px=4, shift_px=1, mirrored=False)
    top, left = draws.offset(sample_hash(torch.arange(500), seed=0, epoch=0), pixels.choices)
    shifted = pixels.crops(torch.zeros(500, dtype=torch.int64), top, left, None)
    padded = functional.pad(image[0, :, :, 0], (1, 1, 1, 1))
    crops = {tuple(padded[y : y + 4, x : x + 4].flatten().tolist()) for y in range(3) for x in range(3)}
    assert {tuple(one.flatten().tolist()) for one in shifted} == crops


@pytest.mark.parametrize("flag", ["--shift", "--cutout"])
def test_a_change_that_leaves_nothing_of_an_image(flag: str) -> None:
    with pytest.raises(TrainError) as error:
        job(f"{flag}=12")
    told = f"{flag} 12: of images of 12x12 nothing would be left; 0 to 11 is allowed"
    assert (error.value.code, error.value.message) == (78, told)
    job(f"{flag}=12", "--no-augment")
    job(f"{flag}=11")


def test_about_half_are_mirrored_and_it_is_the_same_with_and_without_kept_mirror_images() -> None:
    images = torch.randint(0, 256, (1000, 6, 6, 3), dtype=torch.uint8)
    bits = sample_hash(torch.arange(1000), seed=0, epoch=0)
    index, flips = torch.arange(1000), draws.mirrored(bits)
    kept, made = (lay_out(images, crop_px=6, shift_px=2, mirrored=mirrored) for mirrored in (True, False))
    assert [len(kept.squares_MHWC), len(made.squares_MHWC)] == [2000, 1000]
    assert kept.squares_MHWC.numel() == bytes_laid_out(images, shift_px=2, mirrored=True)
    top, left = draws.offset(bits, 5)
    assert torch.equal(kept.crops(index, top, left, flips), made.crops(index, top, left, flips))
    plain = made.crops(index, top, left, None)
    mirrored = (made.crops(index, top, left, flips) == plain.flip(2)).flatten(1).all(1)
    assert torch.equal(mirrored, flips.bool())
    assert 440 < int(mirrored.sum()) < 560


def test_larger_squares_are_cropped_in_the_middle_for_a_test() -> None:
    images = torch.randint(0, 256, (3, 10, 10, 3), dtype=torch.uint8)
    middles = lay_out(images, crop_px=6, shift_px=0, mirrored=False).middles(torch.tensor([2, 0]))
    assert torch.equal(middles, images[[2, 0], 2:8, 2:8])


def test_a_cutout_is_a_square_of_its_side_and_an_erased_part_lies_inside() -> None:
    bits = sample_hash(torch.arange(2000), seed=0, epoch=0)
    cut = boxes.cutout(bits, 4, 16)[:, 0]
    assert cut.shape == (2000, 16, 16)
    assert cut.flatten(1).sum(1).max() == 16
    assert cut.flatten(1).sum(1).min() >= 4  # in a corner a quarter of it is left
    assert cut.float().mean(0).min() > 0  # every pixel is cut out some time
    erased = boxes.erased(bits, 0.5, 16)[:, 0].flatten(1).sum(1)
    assert 900 < int((erased > 0).sum()) < 1100
    areas = erased[erased > 0] / 16**2
    assert 0.01 < areas.min() < 0.04 < 0.3 < areas.max() < 0.4


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_beta_is_drawn_as_by_torch(alpha: float) -> None:
    drawn = draws.beta((torch.arange(20_000) + 0.5) / 20_000, draws.beta_table(alpha))
    torch.manual_seed(0)
    expected = torch.distributions.Beta(alpha, alpha).sample((2_000_000,))
    wanted = torch.tensor([0.05, 0.25, 0.5, 0.6, 0.9])
    assert torch.allclose(drawn.quantile(wanted), expected.quantile(wanted), atol=0.01)


def test_mixed_images_are_as_much_of_each_other_as_their_labels_say() -> None:
    bits = sample_hash(torch.arange(400), seed=0, epoch=0)
    ones, zeros = torch.ones(400, 1, 16, 16), torch.zeros(400, 1, 16, 16)
    for alphas in ((0.5, 0.0), (0.0, 1.0), (0.5, 1.0)):
        how = mixing(*alphas, CPU)
        assert how is not None
        images, own = mix(how, ones, zeros, bits)
        assert torch.allclose(images.mean((1, 2, 3)), own, atol=1e-5)
        assert 0.4 < float(own.mean()) < 0.75
        pasted = ((images == 0) | (images == 1)).flatten(1).all(1).float().mean()
        assert (float(pasted) > 0.9) if alphas[0] == 0 else (float(pasted) < 0.7)
    assert mixing(0, 0, CPU) is None
    drawn = partners(bits, 10)
    assert drawn.unique().tolist() == list(range(10))


ALL = ("--flip", "--shift=2", "--mixup=0.4", "--cutmix=1", "--cutout=3", "--erase=0.5")


@pytest.mark.parametrize("changes", [(), ("--flip", "--shift=2"), ALL])
def test_both_paths_give_the_same_batches(changes: tuple[str, ...]) -> None:
    device, loader = job(*changes, "--input=device"), job(*changes, "--input=loader", "--workers=1")
    assert device.preparation.feed.told == f"{0.1 if '--flip' in changes else 0.0:.1f} MB of images on the device"
    assert loader.preparation.feed.told == "images by 1 loader worker a rank"
    for epoch, first in ((0, 0), (1, 1)):  # the second one is begun in its middle
        order = epoch_order(64, seed=0, epoch=epoch)
        for batch in torch.split(order, 20)[first:]:
            one, other = (each.preparation.batch(batch, epoch=epoch) for each in (device, loader))
            assert torch.equal(one.images_BCHW, other.images_BCHW)
            assert torch.equal(one.labels_B, other.labels_B)
            assert (one.own_B is None) == ("--mixup=0.4" not in changes)
            if one.own_B is not None and one.others_B is not None:
                assert torch.equal(one.own_B, other.own_B)
                assert torch.equal(one.others_B, other.others_B)


def test_a_sample_is_changed_the_same_way_on_every_rank() -> None:
    whole = job(*ALL).preparation
    batch = epoch_order(64, seed=0, epoch=3)[:20]
    at_once = whole.batch(batch, epoch=3)
    shares = [share_of(batch, rank=rank, world_size=3).indices_N for rank in range(3)]
    parts = [job(*ALL, rank=rank, size=3).preparation.batch(shares[rank], epoch=3) for rank in range(3)]
    assert torch.equal(torch.cat([part.images_BCHW for part in parts]), at_once.images_BCHW)
    assert torch.equal(torch.cat([part.own_B for part in parts]), at_once.own_B)
    assert not torch.equal(whole.batch(batch, epoch=4).images_BCHW, at_once.images_BCHW)


def test_without_changes_a_batch_is_the_images() -> None:
    plain = job("--no-augment", "--precision=fp32")
    batch = plain.preparation.batch(torch.arange(20), epoch=0)
    images = plain.train.images_NHWC[:20].permute(0, 3, 1, 2).float()
    back = (batch.images_BCHW - plain.preparation.normalise.offset) / plain.preparation.normalise.scale
    assert torch.allclose(back.float(), images, atol=1e-2)
    assert batch.images_BCHW.is_contiguous(memory_format=torch.channels_last)
