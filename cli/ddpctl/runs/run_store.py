"""Keeps the records of runs in the user's state directory, and measures the disk space of runs.

A record contains the request, and the data with which the target finds the run again. The target reports the run's
status. The end of a run is recorded, because the target may be unable to report it later.
"""

import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from ddpctl.errors import CannotWriteError, NoInputError, UsageError, writing
from ddpctl.job.launch_plan import Plan, Request
from ddpctl.job.spec import JobSpec, check_nodes
from ddpctl.job.values import from_record
from ddpctl.runs.run_status import ENDED, NodeReport, RunStatus, fold_nodes
from ddpwire import kaggle, locks
from ddpwire.events import is_time
from ddpwire.run_files import (
    CHECKPOINTS,
    OUTCOME,
    RECORD,
    Outcome,
    node_name,
    parse_json,
    read_outcome,
    read_record,
    write_atomic,
)

TORN_AFTER_S = 10.0  # an older folder without a record belongs to a killed launch
PULLED = "output"  # in a run's folder: what `ddpctl pull` fetches
_CHECKPOINT_FILES = "step-*.pt"  # of ddptrain


@dataclass(frozen=True, kw_only=True)
class Run(Plan):
    """The record of one run: its plan, and the data with which the target finds the run again."""

    created: float  # seconds since the epoch
    target: str  # the target's name in the file, or its kind
    kind: str
    options: Mapping[str, Any]
    version: str  # of the ddpctl that started it
    base_name: str = ""  # "night" if ddpctl has named a resumed run "night-2"
    # The target's data. "logs": where the logs are, if they are not on this machine.
    handle: Mapping[str, Any] = field(default_factory=dict)

    @property
    def elsewhere(self) -> bool:
        """Whether the logs and checkpoints are on other machines."""
        return "logs" in self.handle

    @property
    def logs_at(self) -> str:
        """The location of the logs: the run's folder, or the location that the target reports."""
        return str(self.handle.get("logs", self.folder))


# Records: one folder per run, which contains one ``run.json``


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
    """Return the folder of this user's runs: $DDPCTL_STATE_DIR, Kaggle's working folder, or the XDG state directory."""
    if given := environ.get("DDPCTL_STATE_DIR"):
        return Path(given).absolute()
    if on := kaggle.session(environ):
        return on.working / kaggle.RUNS
    if given := environ.get("XDG_STATE_HOME"):
        return Path(given).absolute() / "ddpctl" / "runs"
    if not (home := environ.get("HOME")):
        raise CannotWriteError("HOME is not set, so runs have no folder: set DDPCTL_STATE_DIR to a writable folder")
    return Path(home).absolute() / ".local" / "state" / "ddpctl" / "runs"


def choose_name(root: Path, request: Request) -> tuple[str, str]:
    """Return the requested name of a run, or an unused one, and its base name if ddpctl has given it a number.

    An unused name is such as ``digits-otter``. A run that resumes another is called ``night-2``, with the base name
    ``night``.
    """
    if request.name:
        return request.name, ""
    if old := request.resumes:
        base = old.base_name or old.name  # the number in a user's own name, such as resnet-50, belongs to the base name
        return next(
            f"{base}-{number}" for number in itertools.count(2) if not (root / f"{base}-{number}").exists()
        ), base
    names = [f"{request.job.name}-{word}" for word in WORDS]
    free = [name for name in names if not (root / name).exists()]
    number = "" if free else f"-{int(time.time()) % 100_000}"
    return random.choice(free or names) + number, ""  # noqa: S311 -- a name, no secret


def has_checkpoint(run: Run) -> bool:
    """Return whether the run has a checkpoint. Assume that it has one if its checkpoints are not on this machine."""
    return run.elsewhere or bool(run.job.checkpoint_dir) or any(Path(run.checkpoint_dir).glob("[!.]*"))


def has_ddptrain_checkpoint(folder: Path) -> bool:
    """Return whether a folder on this machine has a checkpoint of ddptrain."""
    return any(folder.glob(_CHECKPOINT_FILES))


def checkpoints_here(run: Run) -> Path | None:
    """Return the folder of a run's checkpoints on this machine, or None. `ddpctl pull` may have fetched them.

    A run that resumed another run has its checkpoints in the folder of the other run.
    """
    own = Path(run.checkpoint_dir)
    is_there = own.is_absolute() and has_ddptrain_checkpoint(own)
    if is_there or not (run.elsewhere or run.job.checkpoint_dir):
        return own
    fetched = {path.parent for path in Path(run.folder, PULLED).glob(f"**/{CHECKPOINTS}/{_CHECKPOINT_FILES}")}
    return max(fetched, key=lambda folder: (folder.parent.name == run.name, folder.stat().st_mtime), default=None)


def check_free(root: Path, name: str) -> None:
    """Check that a new run in ``root``, the folder of all runs, can have the name ``name``.

    Raises UsageError if a run has this name, and CannotWriteError if a file exists where a folder is needed. If an
    earlier launch with this name was killed before it wrote a record, its folder is removed.
    """
    folder = root / name
    with suppress(OSError):
        names = {path.name for path in folder.iterdir() if not path.name.startswith(f".{RECORD}.")}
        is_old = time.time() - folder.stat().st_mtime > TORN_AFTER_S
        if is_old and names <= {_LAUNCH, CHECKPOINTS} and not any((folder / CHECKPOINTS).glob("*")):
            launch = _launch_in(folder)
            if launch is None or not launch.going:
                discard(folder)
    if folder.is_dir():
        raise UsageError(
            f"--name: a run named '{name}' already exists: choose another name, remove it with ddpctl rm {name}, "
            f"or continue from its last checkpoint with --resume {name} and without --name"
        )
    if os.path.lexists(folder) or (root.exists() and not root.is_dir()):
        raise CannotWriteError(f"cannot keep runs in {root}: a file with this name exists")


def create(root: Path, name: str, *, resumes: bool = False) -> Path:
    """Create and return a run's folder, with a checkpoint folder unless the run ``resumes`` another run.

    Raises UsageError if a run has this name, and CannotWriteError if the folder cannot be written.
    """
    folder = root / name
    check_free(root, name)
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        if not resumes:
            (folder / CHECKPOINTS).mkdir()
    except FileExistsError:  # another launch has created it
        check_free(root, name)
        raise
    except OSError as error:
        raise CannotWriteError(
            f"cannot keep the run's record in {root}: {error.strerror}: set DDPCTL_STATE_DIR to a writable folder"
        ) from None
    return folder


# A launch in progress holds a lock on a file in the run's folder, and removes the file when the record is complete. If
# the file exists and is not locked, the launch was killed.

_LAUNCH = "launch.lock"


@contextmanager
def launching(folder: Path) -> Iterator[Callable[[str], None]]:
    """Hold the lock of a launch. Yield a function that records what the launch does.

    The function writes to the locked file ``launch.lock`` in the run's folder. The file is removed when the ``with``
    block ends, but not after an error.
    """
    path = folder / _LAUNCH
    with writing(path):
        file = path.open("wb", buffering=0)
    with file:
        locks.lock(file.fileno(), path, wait_s=None)  # waits for processes that check the lock
        try:
            with writing(path):
                size = file.write(f"{os.getpid()} {os.uname().nodename}\n".encode())
        except CannotWriteError:
            discard(folder)
            raise

        def note(text: str) -> None:
            with suppress(OSError, ValueError):  # ValueError: the file is closed
                file.truncate(size)
                os.pwrite(file.fileno(), text.encode(), size)

        yield note
        path.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch that has not finished."""

    going: bool  # False: it was killed
    pid: int
    host: str
    doing: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def unfinished_launch(run: Run) -> Launch | None:
    """Return the launch of a run, or None if the launch has finished."""
    return _launch_in(Path(run.folder))


def _launch_in(folder: Path) -> Launch | None:
    try:
        with (folder / _LAUNCH).open() as file:
            head, _, doing = file.read().partition("\n")
            pid, _, host = head.strip().partition(" ")
            state = locks.lock(file.fileno(), folder / _LAUNCH, shared=True)
            going = state is locks.Lock.BUSY
            if state is locks.Lock.UNSUPPORTED:  # a process on another machine counts as alive
                going = host != os.uname().nodename or Path(f"/proc/{pid}").exists()
            return Launch(going=going, pid=int(pid or 0), host=host, doing=doing if going else "")
    except (OSError, ValueError):
        return None


# Who asked a run to stop: its nodes only see a signal.

_STOP = "stop.json"


def note_stop(run: Run, by: str) -> None:
    """Record who stops a run. A write error is ignored."""
    with suppress(OSError):
        write_atomic(Path(run.folder) / _STOP, (json.dumps({"by": by, "time": time.time()}) + "\n").encode())


def stopped_by(run: Run) -> str | None:
    """Return who stopped the run with ddpctl on this machine, such as ``you (Ctrl-C)``, or None if nobody did."""
    try:
        return str(parse_json(read_record(Path(run.folder) / _STOP))["by"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# The end of a run is recorded, because the target may be unable to report it later. If the nodes' folders are on this
# machine, the record consists of the nodes' outcomes. Otherwise, a file contains the status that the target reported.

_END = "end.json"


def note_end(run: Run, state: RunStatus) -> None:
    """Record how a run ended, unless the outcomes of its nodes are on this machine. A write error is ignored."""
    if _outcomes(run) or (Path(run.folder) / _END).exists():
        return
    outcome = asdict(state.outcome) if state.outcome else None
    end = {"state": state.state, "message": state.message, "code": state.code, "outcome": outcome}
    with suppress(OSError):
        write_atomic(Path(run.folder) / _END, (json.dumps(end, indent=1) + "\n").encode())


def known_end(run: Run) -> RunStatus | None:
    """Return the recorded end of a run, or None if there is no record of it."""
    if outcomes := _outcomes(run):
        nodes = tuple(
            NodeReport(node=node, alive=False, state=None, outcome=outcome) for node, outcome in outcomes.items()
        )
        return fold_nodes(run.name, nodes, young=False)
    try:
        end = parse_json(read_record(Path(run.folder) / _END))
        outcome = read_outcome(json.dumps(end["outcome"])) if end["outcome"] else None
        if end["state"] not in ENDED:
            return None
        return RunStatus(run=run.name, state=end["state"], message=end["message"], code=end["code"], outcome=outcome)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _outcomes(run: Run) -> dict[int, Outcome]:
    paths = {node: Path(run.folder) / node_name(node) / OUTCOME for node in range(run.job.max_machines)}
    try:
        return {node: read_outcome(read_record(path).decode()) for node, path in paths.items()}
    except (OSError, ValueError):
        return {}


def save(run: Run) -> None:
    """Write a run's record."""
    with writing(path := Path(run.folder, RECORD)):
        write_atomic(path, (json.dumps(asdict(run), indent=1) + "\n").encode())


def discard(folder: Path) -> None:
    """Delete a run's folder."""
    shutil.rmtree(folder, ignore_errors=True)


def load_all(root: Path) -> tuple[Run, ...]:
    """Return all runs, newest first. Folders without a readable record are skipped."""
    runs = [run for folder in _folders(root) if (run := read(folder))]
    return tuple(sorted(runs, key=lambda run: run.created, reverse=True))


def unreadable(root: Path, runs: Collection[Run]) -> tuple[Path, ...]:
    """Return the folders with an unreadable record. ``runs`` is the result of ``load_all``."""
    whole = {run.name for run in runs}
    return tuple(folder for folder in _folders(root) if folder.name not in whole and (folder / RECORD).exists())


def load(root: Path, name: str | None, *, whole: bool = False) -> Run:
    """Return the run ``name``, or the newest run if ``name`` is None. Raises NoInputError.

    Unless ``whole`` is true, ``name`` can also be the beginning of a run's name. It must then match only one run.
    """
    if name == "":
        raise NoInputError("the run's name is empty: name a run (ddpctl ps lists the runs)")
    if name and "/" in name:
        raise NoInputError(
            f"{name} is a folder, but a run's name is expected here (ddpctl ps lists the runs)",
            hint="status, logs, explain, profile, top, timeline, report and export take the folder of a run that was "
            "started by hand",
        )
    if name and (run := read(root / name)):
        return run
    if name and (record := root / name / RECORD).exists():
        raise NoInputError(f"the record of run '{name}' cannot be read: {record} is corrupt, or not a run's record")
    runs = load_all(root)
    if not runs:
        raise NoInputError(f"no run yet in {root}: start one with ddpctl launch")
    if name is None:
        return runs[0]
    matches = [] if whole else [run for run in runs if run.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise NoInputError(f"{name!r} is ambiguous: {', '.join(sorted(run.name for run in matches))}")
    known = ", ".join(run.name for run in runs[:5])
    raise NoInputError(f"no run named '{name}'; the newest are {known} (ddpctl ps lists all)")


def _folders(root: Path) -> Iterator[Path]:
    try:
        with os.scandir(root) as entries:
            yield from sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise NoInputError(f"cannot read the runs in {root}: {error.strerror}") from None


def read(folder: Path) -> Run | None:
    """Return the run whose record is in ``folder``. Return None if the record is not readable."""
    try:
        text = read_record(folder / RECORD).decode()
        if "\\u0000" in text:  # a path or an argument cannot contain NUL
            return None
        record = parse_json(text)
        job = from_record(JobSpec, record["job"])
        check_nodes(job.nodes)
        values = {item.name: record[item.name] for item in fields(Run) if item.name in record}
        run = Run(**{**values, "job": job, "folder": str(folder), "name": folder.name})
        texts = (run.target, run.kind, run.cwd, run.checkpoint_dir, run.version, run.uid, run.user, run.base_name)
        tables = (run.options, run.handle, run.job.env)
        whole = is_time(run.created) and all(isinstance(table, Mapping) for table in tables)
        return run if whole and all(isinstance(text, str) for text in texts) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


@dataclass(frozen=True, kw_only=True)
class DiskUsage:
    """The disk space that a run's folder uses on one machine."""

    path: str  # on its machine; ~ is the home of the user who logs in there
    host: str = ""  # empty: this machine
    size: int = 0  # bytes that a removal frees, so files with several hard links do not count
    checkpoints: int = 0  # how many of these bytes are checkpoints
    made: str = ""  # a text about files that its script has made in its copy of the project
    stays: tuple[str, ...] = ()  # the targets of its symbolic links, which are not removed

    def __str__(self) -> str:
        return f"{self.host}:{self.path}" if self.host else self.path

    @cached_property
    def names(self) -> frozenset[str]:
        """The folder's path. For a folder on this machine, also its path after symbolic links are resolved."""
        return frozenset({self.path} if self.host else {self.path, os.path.realpath(self.path)})


def folders_above(place: str) -> set[str]:
    """Return the folders above a PATH or HOST:PATH. HOST is ignored, because hosts may share a home folder."""
    paths = (place, place.partition(":")[2], os.path.realpath(place))
    return {path[:at] or "/" for path in paths for at, char in enumerate(path) if char == "/"}
