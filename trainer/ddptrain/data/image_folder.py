# ruff: noqa: N806 - tensors carry their shape in their name
"""A folder with .png and .jpg pictures in a subfolder for each class.

The class folders may be in two folders, train and val (or test). The classes are sorted by name. Each picture is
decoded once and stored as a square that is a little larger than the model's images. The squares of the training set or
of the test set are in one .npy file, which is mapped into memory.
"""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddptrain.config import DataOptions
from ddptrain.data.base import ImageDataset, Samples
from ddptrain.data.sampling import sample_hash
from ddptrain.errors import TrainError, log_warning, os_errors
from ddpwire.exits import Exit
from ddpwire.machine import usable_cores

ENDINGS = (".png", ".jpg", ".jpeg")
HELD_OUT = 10  # one of this many pictures is held out if there is no folder of test pictures
NUM_NAMED = 3  # how many of the skipped files the warning names
MARGIN = 256 / 224  # the side of a cached square divided by the side of a crop: the usual ratio for ImageNet


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The pictures in a folder, with their classes."""

    classes: tuple[str, ...]
    train: tuple[Path, ...]
    test: tuple[Path, ...]


def list_pictures(folder: Path) -> Listing:
    """Return the pictures of a folder, sorted. Raises TrainError."""
    if not folder.is_dir():
        hint = "give a folder that contains CLASS/*.png or *.jpg"
        raise TrainError(Exit.NO_INPUT, f"--data-dir {folder} does not exist", hint=hint)
    test_folder = next((folder / name for name in ("val", "test") if (folder / name).is_dir()), None)
    if test_folder is None or not (folder / "train").is_dir():
        # Some pictures are the test set. The choice does not depend on the seed.
        classes, paths = _pictures(folder)
        drawn = sample_hash(torch.arange(len(paths)), seed=0, epoch=0).argsort(stable=True)
        held_out = set(drawn[: max(1, len(paths) // HELD_OUT)].tolist())
        train = tuple(path for number, path in enumerate(paths) if number not in held_out)
        return Listing(classes=classes, train=train, test=tuple(paths[number] for number in sorted(held_out)))
    classes, train = _pictures(folder / "train")
    others, test = _pictures(test_folder)
    if strange := sorted(set(others) - set(classes)):
        raise TrainError(Exit.DATA, f"{test_folder} has classes that are not in train: {', '.join(strange)}")
    return Listing(classes=classes, train=train, test=test)


def _pictures(folder: Path) -> tuple[tuple[str, ...], tuple[Path, ...]]:
    classes = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "."))
    files = (path for name in classes for path in sorted((folder / name).iterdir()))
    paths = tuple(path for path in files if path.suffix.lower() in ENDINGS)
    if len(classes) < 2 or len(paths) < 2:
        folders = f"{len(classes)} class folder{'s' * (len(classes) != 1)}"
        raise TrainError(
            Exit.NO_INPUT,
            f"--data-dir {folder} contains {len(paths)} picture{'s' * (len(paths) != 1)} in {folders}",
            hint="it must contain at least two class folders with .png or .jpg pictures",
        )
    return classes, paths


def prepare_image_folder(options: DataOptions) -> None:
    """Decode the pictures unless they are in the cache. Warn about files that are ignored. Raises TrainError."""
    listing, top = list_pictures(options.folder), options.folder
    pictures, classes = {*listing.train, *listing.test}, listing.classes
    roots = {path.parent.parent for path in pictures}
    folders = {top, *roots, *(root / name for root in roots for name in classes)}
    entries = (path for folder in sorted(folders) if folder.is_dir() for path in sorted(folder.iterdir()))
    visible = (path for path in entries if path.name[0] != "." and path not in pictures)
    ignored = [str(path.relative_to(top)) for path in visible if path.is_file() or path.parent.name in classes]
    if ignored:
        more = f" and {len(ignored) - NUM_NAMED} more" if len(ignored) > NUM_NAMED else ""
        allowed = f"{', '.join(ENDINGS[:-1])} and {ENDINGS[-1]} files in class folders"
        reason = f"these entries of {top} are ignored, because only {allowed} are read"
        reason = f"{reason}: {', '.join(ignored[:NUM_NAMED])}{more}"
        log_warning(reason)
    for paths in (listing.train, listing.test):
        _write_cache(paths, options)


def load_image_folder(options: DataOptions, _seed: int) -> ImageDataset:
    """Load the data set from its cache. Raises TrainError."""
    listing = list_pictures(options.folder)
    number = {name: number for number, name in enumerate(listing.classes)}

    def samples(paths: tuple[Path, ...]) -> Samples:
        images_NHWC, file = _open_cache(paths, options)
        labels_N = torch.tensor([number[path.parent.name] for path in paths])
        return Samples(images_NHWC=images_NHWC, labels_N=labels_N, file=file)

    return ImageDataset(
        name=options.folder.resolve().name,
        classes=len(listing.classes),
        flip=True,
        train=samples(listing.train),
        test=samples(listing.test),
        crop_px=options.image_size,
    )


def _side_px(options: DataOptions) -> int:
    return round(options.image_size * MARGIN)


def _cache_file(paths: Sequence[Path], options: DataOptions) -> Path:
    """Return the path of the cache file for these pictures. Raises TrainError if one of them is missing.

    The name of the cache file contains a hash of the pictures' names, sizes and modification times. So a changed folder
    gets a new cache file.
    """
    digest = hashlib.sha256()
    for path in paths:
        with os_errors(Exit.NO_INPUT, f"{path} cannot be read"):
            status = path.stat()
        digest.update(f"{path.parent.name}/{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    folder = options.cache or options.folder / ".ddptrain"
    return folder / f"{_side_px(options)}px-{digest.hexdigest()[:16]}.npy"


def _write_cache(paths: Sequence[Path], options: DataOptions) -> None:
    """Decode the pictures, and write their cache file, unless the file exists already. Raises TrainError."""
    file = _cache_file(paths, options)
    if file.exists():
        return
    with os_errors(
        Exit.CANNOT_WRITE, f"decoded pictures cannot be written to {file.parent}", hint="give a --cache-dir"
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".decoding-")
        os.close(handle)
        partly = Path(name)
        try:
            _decode(paths, partly, _side_px(options))
            partly.replace(file)
        finally:
            partly.unlink(missing_ok=True)


def _open_cache(paths: Sequence[Path], options: DataOptions) -> tuple[torch.Tensor, Path]:
    """Map the cache file into memory. Return the square images and the path of the file. Raises TrainError."""
    file = _cache_file(paths, options)
    try:
        pages = np.load(file, mmap_mode="c")  # never written to; torch accepts "c" without a warning
    except FileNotFoundError:
        message = f"{file} does not exist: --cache-dir or --data-dir must be the same folder on all nodes"
        raise TrainError(Exit.NO_INPUT, message) from None
    except (OSError, ValueError) as error:
        raise TrainError(Exit.DATA, f"{file} is corrupt ({error})", hint="delete it") from None
    return torch.from_numpy(pages), file


def _decode(paths: Sequence[Path], file: Path, side_px: int) -> None:
    shape = (len(paths), side_px, side_px, 3)
    squares: Any = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape)
    with file.open("r+b") as opened:  # a full disk fails here, and not with SIGBUS
        os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)

    def decode_one(number: int) -> None:
        squares[number] = _square(paths[number], side_px)

    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(decode_one, range(len(paths))))  # raises what decode_one raises
    squares.flush()


def _square(path: Path, side_px: int) -> Any:
    """Return the central square of a picture, resized so that its shorter side is ``side_px``. Raises TrainError."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            opened.draft("RGB", (side_px, side_px))
            image = opened.convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).splitlines()[0].replace(f" {str(path)!r}", "") if str(error) else type(error).__name__
        raise TrainError(Exit.DATA, f"{path} is corrupt: {reason}; delete it, or replace it") from None
    scale = side_px / min(image.size)
    width, height = (max(side_px, round(side * scale)) for side in image.size)
    x_px, y_px = (width - side_px) // 2, (height - side_px) // 2
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((x_px, y_px, x_px + side_px, y_px + side_px)))
