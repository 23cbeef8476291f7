"""Finds data sets in the input folder of a Kaggle session, in the usual layouts of uploaded data sets.

The input folder is read-only, and its folders and files may have any names. If torchvision expects other names, a
temporary folder with symbolic links is created. No data is copied.
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from ddptrain.config import DataOptions
from ddptrain.data.datasets import MNIST_FILES as MNIST_FILES
from ddptrain.data.image_folder import ENDINGS
from ddptrain.errors import TrainError, config_error
from ddpwire import kaggle
from ddpwire.exits import Exit

MAX_DEPTH = 5  # datasets/OWNER/NAME/FOLDER/FOLDER
MAX_FOLDERS = 4000  # a limit for data sets with a folder for each picture
_CIFAR = {  # the folder, two of its files, and its archive
    "cifar10": ("cifar-10-batches-py", "data_batch_1", "batches.meta", "cifar-10-python.tar.gz"),
    "cifar100": ("cifar-100-python", "train", "meta", "cifar-100-python.tar.gz"),
}


def locate(options: DataOptions, environ: Mapping[str, str]) -> DataOptions:
    """Find the folder that contains the data. Return the options with ``folder`` set to it. Raises TrainError.

    Outside Kaggle, or with --data-dir, the options are returned unchanged. If no folder contains the data, ``folder``
    is set to a temporary folder for a download. It is an error if no folder contains the pictures for
    ``--data folder``, or if several folders contain the data.
    """
    session = kaggle.session(environ)
    is_known = options.name in _LAYOUT_CHECKS
    if session is None or not is_known or options.folder != DataOptions().folder or options.folder.exists():
        return options
    folders = _find(options.name, session.input)
    if not folders:
        if options.name == "folder":
            raise TrainError(
                Exit.NO_INPUT,
                f"no folder below {session.input} contains pictures",
                hint="add a data set to the notebook, or give --data-dir",
            )
        return replace(options, folder=_scratch(f"download-{options.name}"))
    if len(folders) > 1:
        names = ", ".join(str(path) for path in folders)
        subject = "pictures were" if options.name == "folder" else "this data set was"
        message = f"--data {options.name}: {subject} found in several folders ({names})"
        raise config_error(message, hint="choose one with --data-dir")
    (location,) = folders
    if options.name == "folder":
        return replace(options, folder=location, cache=options.cache or _scratch(f"cache-{_key(location)}"))
    return replace(options, folder=_view(options.name, location))


def _find(name: str, top: Path) -> list[Path]:
    """Return the folders that contain the data set.

    The search begins at ``top``. The next deeper level is searched only if no folder is found.
    """
    level, seen = [top], 0
    for _ in range(MAX_DEPTH + 1):
        matches: list[Path] = []
        below: list[Path] = []
        for path in level:
            seen += 1
            if seen > MAX_FOLDERS:
                return matches
            with suppress(OSError), os.scandir(path) as entries:
                listed = list(entries)
                below += sorted(Path(entry.path) for entry in listed if entry.is_dir() and entry.name[0] != ".")
                if _LAYOUT_CHECKS[name](path, frozenset(entry.name for entry in listed)):
                    matches.append(path)
        if matches:
            break
        level = below
    return matches


def _holds_cifar(name: str, path: Path, names: frozenset[str]) -> bool:
    folder, first, meta, archive = _CIFAR[name]
    whole = first in names and meta in names
    return archive in names or (whole and path.is_dir()) or (folder in names and (path / folder / first).is_file())


def _mnist_file(path: Path, name: str) -> Path | None:
    """Return the path of an MNIST file, or None if it is missing.

    The file may be compressed. Its name may contain ``.idx`` instead of ``-idx``. The file may also be in a folder
    that has the same name as the file.
    """
    dotted = name.replace("-idx", ".idx")
    candidates = (path / name, path / dotted, path / name / name, path / f"{name}.gz", path / f"{dotted}.gz")
    return next((file for file in candidates if file.is_file()), None)


def _holds_mnist(path: Path, names: frozenset[str]) -> bool:
    has_images = any(name.startswith("train-images") for name in names)
    return has_images and all(_mnist_file(path, name) for name in MNIST_FILES)


def _holds_pictures(path: Path, names: frozenset[str]) -> bool:
    if "train" in names and _holds_pictures(path / "train", _names(path / "train")):
        return True
    return sum(_has_picture(path / name) for name in names) >= 2


def _has_picture(folder: Path) -> bool:
    with suppress(OSError), os.scandir(folder) as entries:
        return any(Path(entry.name).suffix.lower() in ENDINGS for entry in entries)
    return False


def _names(folder: Path) -> frozenset[str]:
    with suppress(OSError):
        return frozenset(path.name for path in folder.iterdir())
    return frozenset()


def _view(name: str, location: Path) -> Path:
    """Create a folder in which torchvision finds the files of ``location`` under the names that it expects."""
    view = _scratch(f"view-{_key(location)}")
    if name == "mnist":
        raw = view / "MNIST" / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        for wanted in MNIST_FILES:
            file = _mnist_file(location, wanted)
            if file is not None:
                _link(raw / (f"{wanted}.gz" if file.suffix == ".gz" else wanted), file)
        return view
    folder, first, _, archive = _CIFAR[name]
    if (location / first).is_file():
        _link(view / folder, location)
    elif (location / folder / first).is_file():
        _link(view / folder, location / folder)
    else:
        _link(view / archive, location / archive)
    return view


def _link(path: Path, to: Path) -> None:
    with suppress(FileExistsError):  # another rank of this node was first
        path.symlink_to(to.absolute())


def _scratch(name: str) -> Path:
    folder = Path(tempfile.gettempdir()) / "ddptrain" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainError(Exit.CANNOT_WRITE, f"{folder} cannot be created: {error.strerror}; give --data-dir") from None
    return folder


def _key(location: Path) -> str:
    return sha256(str(location.absolute()).encode()).hexdigest()[:12]


_LAYOUT_CHECKS: Mapping[str, Callable[[Path, frozenset[str]], bool]] = {
    "mnist": _holds_mnist,
    "folder": _holds_pictures,
    **{name: partial(_holds_cifar, name) for name in _CIFAR},
}
