"""The single augmentations against their definitions, and the memory that laying out takes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.messages import assert_names
from tests.unit.ddptrain.test_augment import ALL, state
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ddptrain.data import augment, sampling
from ddptrain.data.augment import lay_out, mix_images, num_bytes_laid_out
from ddptrain.data.base import Samples
from ddptrain.data.sampling import epoch_order, sample_hash


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
        self.most = max(self.most, sum(size for tensor, size in self._made.values() if not tensor.expired()))
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
    builder = state("--no-augment", "--precision=fp32").batch_builder
    images = torch.randint(0, 256, (3, 10, 10, 3), dtype=torch.uint8)
    samples = Samples(images_NHWC=images, labels_N=torch.arange(3))
    data = replace(builder.data, train=samples, test=samples, crop_px=6)
    batch = replace(builder, data=data).test_batch(torch.tensor([1, 2]))
    assert torch.equal(batch.inputs, builder.normalise(images[1:, 2:8, 2:8]))
    assert batch.labels_B.tolist() == [1, 2]


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
        mixup, cutmix = (sampling.beta_table(alpha) if alpha else None for alpha in alphas)
        images, own = mix_images(ones, zeros, bits, mixup=mixup, cutmix=cutmix)
        assert torch.allclose(images.mean((1, 2, 3)), own, atol=1e-5)
        assert 0.4 < float(own.mean()) < 0.75
        pasted = ((images == 0) | (images == 1)).flatten(1).all(1).float().mean()
        assert (float(pasted) > 0.9) if alphas[0] == 0 else (float(pasted) < 0.7)
    needed = state("--mixup=0.4").batch_builder.needed(torch.arange(64), epoch=0)
    assert torch.equal(needed[:64], torch.arange(64))
    assert 30 < len(needed[64:].unique()) < 64


@pytest.mark.parametrize("augmentations", [(), ("--flip", "--shift=2"), ALL], ids=["none", "flip", "all"])
def test_both_paths_give_the_same_batches(augmentations: tuple[str, ...]) -> None:
    device, loader = state(*augmentations, "--input=device"), state(*augmentations, "--input=loader", "--workers=1")
    assert device.batch_builder.feed.description.startswith("0.1 MB" if augmentations else "0.0 MB")
    assert_names(loader.batch_builder.feed.description, "1 worker")
    for epoch, first in ((0, 0), (1, 1)):  # the second one is begun in its middle
        order = epoch_order(64, seed=0, epoch=epoch)
        for batch in torch.split(order, 20)[first:]:
            batch_of_one, other = (each.batch_builder.batch(batch, epoch=epoch) for each in (device, loader))
            assert torch.equal(batch_of_one.inputs, other.inputs)
            assert torch.equal(batch_of_one.labels_B, other.labels_B)
            assert (batch_of_one.own_B is None) == ("--mixup=0.4" not in augmentations)
            if batch_of_one.own_B is not None and batch_of_one.others_B is not None:
                assert torch.equal(batch_of_one.own_B, other.own_B)
                assert torch.equal(batch_of_one.others_B, other.others_B)


def test_a_reflected_border_is_torchs() -> None:
    images = torch.randint(0, 256, (3, 6, 6, 2), dtype=torch.uint8)
    padded = lay_out(images, crop_px=6, shift_px=2, mirrored=True, reflect=True).squares_MHWC
    both = torch.cat([images, images.flip(2)]).permute(0, 3, 1, 2).float()
    assert torch.equal(padded, functional.pad(both, (2, 2, 2, 2), "reflect").permute(0, 2, 3, 1).byte())
