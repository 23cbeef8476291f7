import torch

from ddptrain.augment import augment
from ddptrain.datasets.dataset import Augmentation
from ddptrain.stream import sample_hash


def test_shifts_are_crops_of_the_padded_image_and_all_of_them_occur() -> None:
    image = torch.arange(1, 17, dtype=torch.uint8).view(1, 1, 4, 4)
    bits = sample_hash(torch.arange(500), seed=0, epoch=0)
    shifted = augment(image.expand(500, 1, 4, 4), bits, Augmentation(shift_px=1))
    padded = torch.nn.functional.pad(image[0, 0], (1, 1, 1, 1))
    crops = {tuple(padded[y : y + 4, x : x + 4].flatten().tolist()) for y in range(3) for x in range(3)}
    assert {tuple(one.flatten().tolist()) for one in shifted} == crops


def test_about_half_are_mirrored_whatever_the_batch() -> None:
    images = torch.arange(2 * 3, dtype=torch.uint8).view(1, 1, 2, 3).expand(1000, 1, 2, 3)
    bits = sample_hash(torch.arange(1000), seed=0, epoch=0)
    flipped = augment(images, bits, Augmentation(flip=True))
    is_mirrored = (flipped == images.flip(3)).flatten(1).all(1)
    assert torch.equal(is_mirrored | (flipped == images).flatten(1).all(1), torch.ones(1000, dtype=torch.bool))
    assert 440 < int(is_mirrored.sum()) < 560
    assert torch.equal(flipped[500:], augment(images[500:], bits[500:], Augmentation(flip=True)))


def test_nothing_is_asked_nothing_is_changed() -> None:
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(augment(images, torch.zeros(4, dtype=torch.int64), Augmentation()), images)
