# ruff: noqa: N806 - tensors carry their shape in their name
"""A folder of pictures: CLASS/*.png or *.jpg, or these under train and val (or test). Classes are in alphabetic order.

Pictures are decoded once into a cache, squares a little larger than what a model sees, which is then read as pages.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ddptrain.datasets.dataset import Augmentation, DataSet, Samples
from ddptrain.datasets.decode import open_cache, write_cache
from ddptrain.errors import TrainError
from ddptrain.options.data import DataOptions
from ddptrain.stream import sample_hash
from ddpwire.exits import Exit

ENDINGS = (".png", ".jpg", ".jpeg")
HELD_OUT = 10  # one in so many is held out where there is no folder of test pictures
NUM_NAMED = 3  # of the files that are left out
MARGIN = 256 / 224  # a cached square's side over a crop's: the usual one for ImageNet


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The pictures of a folder."""

    classes: tuple[str, ...]
    train: tuple[Path, ...]
    test: tuple[Path, ...]

    def labels(self, paths: Sequence[Path]) -> torch.Tensor:
        """The numbers of their classes."""
        number = {name: number for number, name in enumerate(self.classes)}
        return torch.tensor([number[path.parent.name] for path in paths])


def list_pictures(folder: Path) -> Listing:
    """What is there, sorted. Raises TrainError."""
    if not folder.is_dir():
        raise TrainError(
            Exit.NO_INPUT, f"--data-dir {folder} is not there: give a folder that holds CLASS/*.png or *.jpg"
        )
    test_folder = next((folder / name for name in ("val", "test") if (folder / name).is_dir()), None)
    if test_folder is None or not (folder / "train").is_dir():
        return _split(*_pictures(folder))
    classes, train = _pictures(folder / "train")
    others, test = _pictures(test_folder)
    if strange := sorted(set(others) - set(classes)):
        raise TrainError(Exit.DATA, f"{test_folder} has classes that are not in train: {', '.join(strange)}")
    return Listing(classes=classes, train=train, test=test)


def _split(classes: tuple[str, ...], found: tuple[Path, ...]) -> Listing:
    """Some held out, the same ones whatever the seed."""
    drawn = sample_hash(torch.arange(len(found)), seed=0, epoch=0).argsort(stable=True)
    held_out = set(drawn[: max(1, len(found) // HELD_OUT)].tolist())
    train = tuple(path for number, path in enumerate(found) if number not in held_out)
    return Listing(classes=classes, train=train, test=tuple(found[number] for number in sorted(held_out)))


def _pictures(folder: Path) -> tuple[tuple[str, ...], tuple[Path, ...]]:
    """The classes, and the pictures of all of them."""
    classes = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "."))
    paths = tuple(
        path for name in classes for path in sorted((folder / name).iterdir()) if path.suffix.lower() in ENDINGS
    )
    if len(classes) < 2 or len(paths) < 2:
        raise TrainError(
            Exit.NO_INPUT,
            f"--data-dir {folder} holds {len(paths)} pictures in {len(classes)} classes: "
            "it should hold a folder of .png or .jpg pictures for each of two or more classes",
        )
    return classes, paths


def left_out(folder: Path, listing: Listing) -> list[str]:
    """Files that lie among the pictures, or beside the classes, and are none; hidden ones are nobody's business."""
    roots = {path.parent.parent for path in (*listing.train, *listing.test)}
    places = {folder, *roots, *(root / name for root in roots for name in listing.classes)}
    found = (path for place in sorted(places) if place.is_dir() for path in sorted(place.iterdir()))
    taken = {*listing.train, *listing.test}
    return [
        str(path.relative_to(folder))
        for path in found
        if path.name[0] != "." and path not in taken and (path.is_file() or path.parent.name in listing.classes)
    ]


def prepare(options: DataOptions) -> None:
    """Decode the pictures, unless it was done; say what is taken for none. Raises TrainError."""
    listing = list_pictures(options.folder)
    if strange := left_out(options.folder, listing):
        more = f" and {len(strange) - NUM_NAMED} more" if len(strange) > NUM_NAMED else ""
        print(
            f"ddptrain: warning: left out of {options.folder}, being no {', '.join(ENDINGS)}: "
            f"{', '.join(strange[:NUM_NAMED])}{more}",
            file=sys.stderr,
            flush=True,
        )
    for paths in (listing.train, listing.test):
        write_cache(paths, cache_folder(options), side_px(options))


def load(options: DataOptions, _seed: int) -> DataSet:
    """The data set, from the cache. Raises TrainError."""
    listing = list_pictures(options.folder)
    cached = partial(open_cache, folder=cache_folder(options), side_px=side_px(options))

    def samples(paths: tuple[Path, ...]) -> Samples:
        images_NHWC, file = cached(paths)
        return Samples(images_NHWC=images_NHWC, labels_N=listing.labels(paths), file=file)

    return DataSet(
        name=options.folder.resolve().name,
        classes=len(listing.classes),
        class_names=listing.classes,
        augmentation=Augmentation(flip=True),
        train=samples(listing.train),
        test=samples(listing.test),
        crop_px=options.image_size,
    ).checked()


def side_px(options: DataOptions) -> int:
    """Of the cached squares."""
    return round(options.image_size * MARGIN)


def cache_folder(options: DataOptions) -> Path:
    """Where the caches are."""
    return options.cache or options.folder / ".ddptrain"
