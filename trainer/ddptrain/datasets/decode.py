"""Pictures of any size and kind, decoded once into one .npy file of equal squares.

The file's name says which pictures, sizes and times it was made of: a changed folder makes another one.
"""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddptrain.errors import TrainError
from ddptrain.place import usable_cores
from ddpwire.exits import Exit


def cache_file(paths: Sequence[Path], folder: Path, side_px: int) -> Path:
    """The cache of these pictures. Raises TrainError when one of them went away."""
    digest = hashlib.sha256()
    try:
        for path in paths:
            about = path.stat()
            digest.update(f"{path.parent.name}/{path.name} {about.st_size} {about.st_mtime_ns}\n".encode())
    except OSError as error:
        raise TrainError(Exit.NO_INPUT, f"{error.filename} cannot be read: {error.strerror}") from None
    return folder / f"{side_px}px-{digest.hexdigest()[:16]}.npy"


def write_cache(paths: Sequence[Path], folder: Path, side_px: int) -> None:
    """Decode the pictures into their cache, unless it is there. Raises TrainError."""
    file = cache_file(paths, folder, side_px)
    if file.exists():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".decoding-")
        os.close(handle)
        partly = Path(name)
        try:
            _decode(paths, partly, side_px)
            partly.replace(file)
        finally:
            partly.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise TrainError(
            Exit.CANNOT_WRITE, f"decoded pictures cannot be written to {folder}: {reason}; give a --cache-dir"
        ) from error


def open_cache(paths: Sequence[Path], folder: Path, side_px: int) -> tuple[torch.Tensor, Path]:
    """The squares, as pages of their file, and the file. Raises TrainError."""
    file = cache_file(paths, folder, side_px)
    try:
        pages = np.load(file, mmap_mode="c")  # never written; "c" is what torch takes without a warning
    except FileNotFoundError:
        raise TrainError(
            Exit.NO_INPUT, f"{file} is not there: is --cache-dir, or --data-dir, the same folder on all nodes?"
        ) from None
    except (OSError, ValueError) as error:
        raise TrainError(Exit.DATA, f"{file} is corrupt ({error}): delete it") from None
    return torch.from_numpy(pages), file


def _decode(paths: Sequence[Path], file: Path, side_px: int) -> None:
    shape = (len(paths), side_px, side_px, 3)
    with file.open("wb") as opened:
        np.lib.format.write_array_header_1_0(opened, {"descr": "|u1", "fortran_order": False, "shape": shape})
        start = opened.tell()
        os.posix_fallocate(opened.fileno(), 0, start + int(np.prod(shape)))  # a full disk shows here, not as a SIGBUS
    squares = np.memmap(file, dtype=np.uint8, mode="r+", offset=start, shape=shape)

    def decode_one(number: int) -> None:
        squares[number] = _square(paths[number], side_px)

    with ThreadPoolExecutor(usable_cores()) as pool:
        for _ in pool.map(decode_one, range(len(paths))):
            pass
    squares.flush()


def _square(path: Path, side_px: int) -> Any:
    """A picture's middle, its shorter side as long as the square's. Raises TrainError."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            opened.draft("RGB", (side_px, side_px))
            image = opened.convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).splitlines()[0].replace(f" {str(path)!r}", "") if str(error) else type(error).__name__
        raise TrainError(Exit.DATA, f"{path} is corrupt: {reason}; delete it, or get it again") from None
    scale = side_px / min(image.size)
    width, height = (max(side_px, round(side * scale)) for side in image.size)
    left, top = (width - side_px) // 2, (height - side_px) // 2
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + side_px, top + side_px)))
