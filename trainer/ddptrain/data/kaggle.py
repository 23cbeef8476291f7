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
from ddptrain.data.datasets import MNIST_FILES, MNIST_FOLDER
from ddptrain.data.image_folder import ENDINGS
from ddptrain.errors import TrainError, config_error, os_errors
from ddpwire import kaggle
from ddpwire.exits import Exit

MAX_DEPTH = 5  # datasets/OWNER/NAME/FOLDER/FOLDER
MAX_FOLDERS = 4000  # a limit for data sets with a folder for each picture
_CIFAR = {  # the folder, two of its files, and its archive
    "cifar10": ("cifar-10-batches-py", "data_batch_1", "batches.meta", "cifar-10-python.tar.gz"),
    "cifar100": ("cifar-100-python", "train", "meta", "cifar-100-python.tar.gz"),
}
Links = dict[str, Path]  # from the names that torchvision expects to the files and folders with the data


def locate(options: DataOptions, environ: Mapping[str, str]) -> DataOptions:
    """Find the folder that contains the data. Return the options with ``folder`` set to it. Raises TrainError.

    Outside Kaggle, or with --data-dir, the options are returned unchanged. If no folder contains the data, ``folder``
    is set to a temporary folder for a download. It is an error if no folder contains the pictures for
    ``--data folder``, or if several folders contain the data.
    """
    session = kaggle.session(environ)
    links_of = _LINKS.get(options.name)
    if session is None or links_of is None or options.folder != DataOptions().folder or options.folder.exists():
        return options
    folders = _find(links_of, session.input)
    if not folders:
        if options.name == "folder":
            raise TrainError(
                Exit.NO_INPUT,
                f"no folder below {session.input} contains pictures",
                hint="add a data set to the notebook, or give --data-dir",
            )
        return replace(options, folder=_scratch(f"download-{options.name}"))
    if len(folders) > 1:
        names = ", ".join(map(str, folders))
        subject = "pictures were" if options.name == "folder" else "this data set was"
        message = f"--data {options.name}: {subject} found in several folders ({names})"
        raise config_error(message, hint="choose one with --data-dir")
    ((location, links),) = folders.items()
    key = sha256(str(location.absolute()).encode()).hexdigest()[:12]
    if options.name == "folder":
        return replace(options, folder=location, cache=options.cache or _scratch(f"cache-{key}"))
    view = _scratch(f"view-{key}")
    for name, target in links.items():
        (view / name).parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # another rank of this node was first
            (view / name).symlink_to(target.absolute())
    return replace(options, folder=view)


def _find(links_of: "LinksOf", top: Path) -> dict[Path, Links]:
    """Return the folders that contain the data set, with their links.

    The search begins at ``top``. The next deeper level is searched only if no folder is found.
    """
    level, seen = [top], 0
    for _ in range(MAX_DEPTH + 1):
        matches: dict[Path, Links] = {}
        below: list[Path] = []
        for path in level:
            seen += 1
            if seen > MAX_FOLDERS:
                return matches
            with suppress(OSError), os.scandir(path) as entries:
                listed = list(entries)
                below += sorted(Path(entry.path) for entry in listed if entry.is_dir() and entry.name[0] != ".")
                if links := links_of(path, frozenset(entry.name for entry in listed)):
                    matches[path] = links
        if matches:
            break
        level = below
    return matches


def _cifar_links(name: str, path: Path, names: frozenset[str]) -> Links:
    folder, first, meta, archive = _CIFAR[name]
    if first in names and meta in names:
        return {folder: path}
    if folder in names and (path / folder / first).is_file():
        return {folder: path / folder}
    return {archive: path / archive} if archive in names else {}


def _mnist_file(path: Path, name: str) -> Path | None:
    """Return the path of an MNIST file, or None if it is missing.

    The file may be compressed. Its name may contain ``.idx`` instead of ``-idx``. The file may also be in a folder
    that has the same name as the file.
    """
    dotted = name.replace("-idx", ".idx")
    candidates = (path / name, path / dotted, path / name / name, path / f"{name}.gz", path / f"{dotted}.gz")
    return next((file for file in candidates if file.is_file()), None)


def _mnist_links(path: Path, names: frozenset[str]) -> Links:
    if not any(name.startswith("train-images") for name in names):
        return {}
    files = {name: _mnist_file(path, name) for name in MNIST_FILES}
    links = {
        str(MNIST_FOLDER / (f"{name}.gz" if file.suffix == ".gz" else name)): file
        for name, file in files.items()
        if file
    }
    return links if len(links) == len(MNIST_FILES) else {}


def _picture_links(path: Path, names: frozenset[str]) -> Links:
    """Return the class folders with pictures if there are at least two, or those in ``train``. They are not linked."""
    if "train" in names:
        with suppress(OSError):
            train = frozenset(entry.name for entry in (path / "train").iterdir())
            if links := _picture_links(path / "train", train):
                return links
    links = {name: path / name for name in names if _has_picture(path / name)}
    return links if len(links) >= 2 else {}


def _has_picture(folder: Path) -> bool:
    with suppress(OSError), os.scandir(folder) as entries:
        return any(Path(entry.name).suffix.lower() in ENDINGS for entry in entries)
    return False


def _scratch(name: str) -> Path:
    folder = Path(tempfile.gettempdir()) / "ddptrain" / name
    with os_errors(Exit.CANNOT_WRITE, f"{folder} cannot be created", hint="give --data-dir"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


LinksOf = Callable[[Path, frozenset[str]], Links]  # of a folder and the names in it; empty: another folder
_LINKS: Mapping[str, LinksOf] = {
    "mnist": _mnist_links,
    "folder": _picture_links,
    **{name: partial(_cifar_links, name) for name in _CIFAR},
}
