"""The records of runs, in the user's state directory: one folder a run, one ``run.json`` in it.

A record says what was asked for and what the target needs to find the run again; how the run fares is
asked of the target, never remembered.
"""

import itertools
import json
import os
import random
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from ddpctl.errors import CannotWriteError, NoInputError, UsageError
from ddpctl.fields import fields_of
from ddpctl.run import Run
from ddpctl.spec import JobSpec, check_nodes
from ddpwire import kaggle
from ddpwire.events import is_time
from ddpwire.folder import CHECKPOINTS, RECORD, write_atomic
from ddpwire.regular import read_regular

WORDS = tuple(
    """
    alder amber arrow aspen badger basil beacon birch bison bramble breeze brook canyon cedar cinder clover cobalt
    comet copper coral cosmos crane cricket dahlia dawn delta dune eagle ember falcon fern finch fjord flint forest
    fox gale garnet geyser glacier granite grove harbor hazel heron hickory indigo iris ivy jade jasper juniper
    kestrel lagoon lark laurel lemon lichen lily linden lotus lynx maple marble meadow meteor mint moss nectar nova
    oak ocean olive onyx opal orbit orchid osprey otter owl pearl pebble pine plum poppy prairie quartz quill rain
    raven reef ridge river robin saffron sage sequoia shore silver slate solar sparrow spruce star stone summit
    swift thistle tide timber topaz trout tulip valley velvet violet walnut willow winter wren zephyr
    """.split()  # noqa: SIM905 -- a word list reads better as text
)


def state_dir(environ: Mapping[str, str]) -> Path:
    """Where the runs of this user are: $DDPCTL_STATE_DIR, on Kaggle its working folder, or the XDG state directory."""
    if given := environ.get("DDPCTL_STATE_DIR"):
        return Path(given).absolute()
    if on := kaggle.session(environ):
        return on.working / kaggle.RUNS
    if given := environ.get("XDG_STATE_HOME"):
        return Path(given).absolute() / "ddpctl" / "runs"
    if not (home := environ.get("HOME")):
        raise CannotWriteError("no HOME to keep runs in: set DDPCTL_STATE_DIR to a folder that can be written")
    return Path(home).absolute() / ".local" / "state" / "ddpctl" / "runs"


def new_name(root: Path, job_name: str) -> str:
    """A short readable name that no run has: ``digits-otter``."""
    free = [word for word in WORDS if not (root / f"{job_name}-{word}").exists()]
    if free:
        return f"{job_name}-{random.choice(free)}"  # noqa: S311 -- a name, no secret
    return f"{job_name}-{random.choice(WORDS)}-{int(time.time()) % 100_000}"  # noqa: S311


def next_name(root: Path, name: str) -> str:
    """What a run that goes on from the run ``name`` is called: ``night-2``, ``night-3``."""
    base = re.sub(r"-[0-9]+$", "", name)
    return next(f"{base}-{number}" for number in itertools.count(2) if not (root / f"{base}-{number}").exists())


def has_checkpoint(run: Run) -> bool:
    """Whether there is anything to go on from; on other machines there may be, and the trainer will say."""
    if run.elsewhere:
        return True
    try:
        return any(entry for entry in os.scandir(run.checkpoint_dir) if not entry.name.startswith("."))
    except OSError:
        return False


def create(root: Path, name: str, *, resumes: bool = False) -> Path:
    """Make a run's folder and return it; one that ``resumes`` has another's checkpoints. A taken name is refused."""
    folder = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        if not resumes:
            (folder / CHECKPOINTS).mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise CannotWriteError(f"cannot keep runs in {root}: a file is in the way") from None
        raise UsageError(
            f"--name: a run named {name} is there already: choose another name, "
            f"or go on from its last checkpoint with --resume {name}"
        ) from None
    except OSError as error:
        raise CannotWriteError(
            f"cannot keep the run's record in {root}: {error.strerror}: "
            "set DDPCTL_STATE_DIR to a folder that can be written"
        ) from None
    return folder


def save(run: Run) -> None:
    """Write a run's record."""
    try:
        write_atomic(Path(run.folder) / RECORD, (json.dumps(asdict(run), indent=1) + "\n").encode())
    except OSError as error:
        raise CannotWriteError(f"cannot write {run.folder}/{RECORD}: {error.strerror}") from None


def discard(folder: Path) -> None:
    """Take back a run that never started."""
    shutil.rmtree(folder, ignore_errors=True)


def load_all(root: Path) -> tuple[Run, ...]:
    """Every run, newest first. Folders that are no runs, and records that cannot be read, are passed over."""
    runs = [run for folder in _folders(root) if (run := _read(folder))]
    return tuple(sorted(runs, key=lambda run: run.created, reverse=True))


def unreadable(root: Path) -> tuple[Path, ...]:
    """Folders whose record is there and cannot be read."""
    return tuple(folder for folder in _folders(root) if (folder / RECORD).exists() and not _read(folder))


def load(root: Path, name: str | None, *, whole: bool = False) -> Run:
    """The run of that name, or, unless it must be ``whole``, of the one name that begins so; None: the newest."""
    runs = load_all(root)
    if name == "":
        raise NoInputError("a run's name is not empty: name a run (ddpctl ps lists them)")
    if name and (folder := root / name) in unreadable(root):
        raise NoInputError(f"the record of {name} cannot be read: {folder / RECORD} is torn, or no run's")
    if not runs:
        raise NoInputError(f"no run yet in {root}: start one with ddpctl launch")
    if name is None:
        return runs[0]
    matches = [run for run in runs if run.name == name]
    if not matches and not whole:
        matches = [run for run in runs if run.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise NoInputError(f"{name} may be {', '.join(sorted(run.name for run in matches))}: give more of the name")
    known = ", ".join(run.name for run in runs[:5])
    raise NoInputError(f"no run named {name}; the newest are {known} (all: ddpctl ps)")


def _folders(root: Path) -> Iterator[Path]:
    try:
        with os.scandir(root) as entries:
            yield from sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise NoInputError(f"cannot read the runs in {root}: {error.strerror}") from None


def _read(folder: Path) -> Run | None:
    try:
        text = read_regular(folder / RECORD).decode()
        if "\\u0000" in text:  # no path and no word has one
            return None
        record = json.loads(text)
        job = _job(record["job"])
        values = {item.name: record[item.name] for item in fields(Run) if item.name in record}
        run = Run(**{**values, "job": job, "folder": str(folder), "name": folder.name})
        texts = (run.target, run.kind, run.cwd, run.checkpoint_dir, run.version)
        tables = (run.options, run.handle, run.job.env)
        whole = is_time(run.created) and all(isinstance(table, Mapping) for table in tables)
        return run if whole and all(isinstance(text, str) for text in texts) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _job(record: Mapping[str, Any]) -> JobSpec:
    """A job as it was written down; what this version does not know is passed over. Raises ValueError or TypeError."""
    job = JobSpec(**{item.name: record[item.name] for item in fields(JobSpec) if item.name in record})
    lists = {name: tuple(getattr(job, name)) for name in ("command", "mounts", "secrets")}
    job = replace(job, **lists, nodes=check_nodes(job.nodes))  # type: ignore[arg-type]
    if not all(field.holds(getattr(job, name)) for name, field in fields_of(JobSpec).items()):
        raise TypeError("not a job")
    return job
