"""Creates records of runs that were started without ddpctl (with sbatch, or with ddprun --run-dir).

The data of a record comes from the files in the run's folder. Such a folder has no ``run.json``. It contains the
folders of nodes or array tasks. If a batch script started the run, there is also a file ``starts``.
"""

import json
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ddpctl import targets
from ddpctl.errors import NoInputError
from ddpctl.job.spec import JobSpec
from ddpctl.runs import run_store
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpwire.events import EVENTS, EVENTS_BEFORE, read_events
from ddpwire.run_files import CHECKPOINTS, ENVIRONMENT, NODE, RECORD, STARTS, read_node, read_regular, read_starts
from ddpwire.version import __version__

UNKNOWN = "unknown"
NODE_DIR, TASK_DIR = re.compile(r"node-([0-9]{1,4})"), re.compile(r"task-([0-9]{1,7})")
EVENT_FILES, FIRST_BYTES = (EVENTS_BEFORE, EVENTS), 4096  # how much of each file is read


def load_all(folder: Path) -> tuple[Run, ...]:
    """Return the run in ``folder``. If ``folder`` is not the folder of a run, return the runs in its subfolders.

    The newest run is the first. Raises NoInputError if the folder cannot be read.
    """
    try:
        runs = [_read(path) for path in ([folder] if _is_run(folder) else folder.iterdir())]
    except OSError as error:
        raise NoInputError(f"cannot read the runs in {folder}: {error.strerror}") from None
    return tuple(sorted((run for run in runs if run), key=lambda run: run.created, reverse=True))


def load(folder: Path) -> Run:
    """Return the run in ``folder``. Raises NoInputError if ``folder`` is not the folder of a run."""
    for run in load_all(folder) if _is_run(folder) else ():
        return run
    raise NoInputError(f"{folder} is not the folder of a run: ddpctl ps --folder {folder.parent} lists the runs there")


def is_by_hand(run: Run) -> bool:
    """Return whether the run was launched without ddpctl."""
    return bool(run.handle.get("by_hand"))


def without_guess(run: Run, status: RunStatus) -> RunStatus:
    """Replace the state ``lost`` with ``unknown`` if the run was started by hand on other machines.

    ddpctl cannot find out whether ddprun still runs on those machines.
    """
    away = sorted({*run.handle.get("hosts", ())} - {os.uname().nodename})
    if status.state != "lost" or not is_by_hand(run) or "job" in run.handle or not away:
        return status
    message = f"the run has no outcome yet; check on {', '.join(away)} whether it is still running"
    return replace(status, state="unknown", message=message, code=None)


def _is_run(folder: Path) -> bool:
    has_file = (folder / RECORD).exists() or (folder / STARTS).exists()
    return has_file or bool(_numbered(folder, NODE_DIR) or _numbered(folder, TASK_DIR))


def _read(folder: Path) -> Run | None:
    if (folder / RECORD).exists():
        return run_store.read(folder)
    tasks = _numbered(folder, TASK_DIR)
    parts = [path for _, path in tasks] or [folder]
    nodes = [(number, path) for part in parts for number, path in _numbered(part, NODE_DIR)]
    starts = [start for part in parts for start in read_starts(_text(part / STARTS))]
    if not nodes and not starts:
        return None
    times, num_ranks = [start.time for start in starts], 1
    for _, path in nodes:
        times += [event.time for event in read_events(*(_text(path / name)[:FIRST_BYTES] for name in EVENT_FILES))]
        ranks: Collection[object] = list(path.glob("rank-*.log"))
        with suppress(ValueError):
            state = read_node(_text(path / NODE))
            ranks = state.ranks
            times.append(state.started)
        num_ranks = max(num_ranks, len(ranks))
    kind, _ = targets.default_kind({})  # of a run that was started without a scheduler
    handle: dict[str, object] = {
        "by_hand": True,
        "dir": str(folder),
        "hosts": [_fact(path, "host") for _, path in nodes],
    }
    script = next((text for _, path in nodes if (text := _fact(path, "script")) != UNKNOWN), UNKNOWN)
    command = ("-m", script.removeprefix("-m ")) if script.startswith("-m ") else (script,)
    if starts:
        kind, handle["job"] = starts[-1].launcher, starts[-1].job
    if tasks:
        handle["tasks"] = [str(number) for number, _ in tasks]
    return Run(
        name=folder.name,
        created=min(times, default=folder.stat().st_mtime),
        target=kind,
        kind=kind,
        options={},
        job=JobSpec(nodes=str(1 + max((number for number, _ in nodes), default=0)), gpus=num_ranks, command=command),
        cwd=str(folder),
        folder=str(folder),
        checkpoint_dir=str(folder / CHECKPOINTS),
        version=__version__,
        handle=handle,
    )


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Return the numbers and paths of subfolders whose names match ``pattern``, sorted by number."""
    with suppress(OSError):
        matches = ((pattern.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
        return sorted((int(match[1]), path) for match, path in matches if match)
    return []


def _text(path: Path) -> str:
    with suppress(OSError):
        return read_regular(path).decode(errors="replace")
    return ""


def _fact(node: Path, key: str) -> str:
    with suppress(ValueError, RecursionError):
        facts = json.loads(_text(node / ENVIRONMENT))
        if isinstance(facts, Mapping) and isinstance(fact := facts.get(key), str):
            return fact or UNKNOWN
    return UNKNOWN
