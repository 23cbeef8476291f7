"""Folders of former runs, and of calls: a former version's output among a Kaggle session's inputs is read-only.

So the run is copied to where runs are, and gone on from there like any other.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePath

from ddpctl import runs
from ddpctl.errors import CannotWriteError
from ddpctl.run import Run
from ddpwire.folder import CHECKPOINTS, RECORD

MAX_DEPTH = 5


def restore(top: Path, root: Path) -> Run | None:
    """Copy the newest run under ``top`` to ``root``, where runs are; None: none is there. Raises CannotWriteError."""
    found = max(_records(top), key=_created, default=None)
    if found is None:
        return None
    try:
        source = json.loads((found / RECORD).read_text())
        first = PurePath(source["checkpoint_dir"]).parent.name  # its own folder, or that of the run that it resumed
        for name in dict.fromkeys((first, found.name)):
            _copy(found.parent / name, root / name)
    except OSError as error:
        raise CannotWriteError(f"cannot copy {found} to {root}: {error.strerror or error}") from None
    return replace(runs.load(root, found.name, whole=True), checkpoint_dir=str(root / first / CHECKPOINTS))


def _copy(source: Path, target: Path) -> None:
    """What a resumed run needs of a former one."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (RECORD, CHECKPOINTS):
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, dirs_exist_ok=True, copy_function=shutil.copyfile)
        elif (source / name).exists():
            shutil.copyfile(source / name, target / name)


def _records(top: Path) -> Iterator[Path]:
    """Folders of runs, not deep below ``top``."""
    level = [top]
    for _ in range(MAX_DEPTH):
        below: list[Path] = []
        for folder in level:
            with suppress(OSError), os.scandir(folder) as entries:
                below += [Path(entry.path) for entry in entries if entry.is_dir() and entry.name[0] != "."]
        yield from (folder for folder in below if (folder / RECORD).is_file())
        level = below


def _created(folder: Path) -> float:
    try:
        return float(json.loads((folder / RECORD).read_text())["created"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def fresh(folder: Path) -> Path:
    """A new folder that nobody else reads."""
    return Path(tempfile.mkdtemp(dir=folder))


def remove(folder: Path) -> None:
    """Take a folder away, and its parent if nothing is left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()
