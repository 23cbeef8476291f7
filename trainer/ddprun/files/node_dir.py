"""The node's folder: its lock, the files of an earlier start of the run, and the files that this node writes.

A queue starts a run again after a preemption, and Kubernetes starts a pod again after the loss of its machine. Then the
ranks' counters continue, so that goodput covers all starts of the run. Files of another run are removed.
"""

import contextlib
import re
import shutil
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddprun.files import process_discovery
from ddprun.output.console import Console
from ddprun.settings.node_config import DEFAULT_RUN_ID, NodeConfig
from ddprun.settings.requeue import Requeues, count_requeues
from ddprun.system.errors import config_error, node_error
from ddpwire import run_files
from ddpwire.events import EVENTS, EVENTS_BEFORE, EventLog, read_events
from ddpwire.exits import Exit
from ddpwire.heartbeat import read_beat
from ddpwire.history import HISTORY
from ddpwire.run_files import HEARTBEAT, METRICS, NODE, NODE_LOG, OUTCOME, SNAPSHOT, NodeState, Outcome, node_name

EVENTS_TAIL_BYTES = 65536  # how much of the end of the events is searched for the highest step
RUN_ID_FILE = f"{METRICS}/run"  # has the id of the run whose counters are kept; a batch script may remove node.json


@dataclass(frozen=True, kw_only=True)
class PreviousRun:
    """What an earlier start of the same run left on this node."""

    heard_at: float  # when it last wrote a file, in seconds since the epoch
    step: int | None  # the highest step of all attempts, if known


def read_previous_run(node_dir: Path, run_id: str) -> PreviousRun | None:
    """Return what an earlier start of the run left, or None if there was none. Raises OSError.

    Remove files that readers would take for files of this start.
    """
    previous_run = _read_previous(node_dir, run_id)
    if previous_run is None:
        shutil.rmtree(node_dir / METRICS, ignore_errors=True)
        for name in (EVENTS, EVENTS_BEFORE, HISTORY):
            (node_dir / name).unlink(missing_ok=True)
    for gauges in node_dir.glob(f"{METRICS}/*/gauge_*"):
        gauges.unlink(missing_ok=True)
    for name in (OUTCOME, SNAPSHOT):
        (node_dir / name).unlink(missing_ok=True)
    (node_dir / METRICS).mkdir(exist_ok=True)
    (node_dir / RUN_ID_FILE).write_text(run_id)
    return previous_run


def _read_previous(node_dir: Path, run_id: str) -> PreviousRun | None:
    try:
        if (node_dir / RUN_ID_FILE).read_text() != run_id or run_id == DEFAULT_RUN_ID:
            return None
    except (OSError, ValueError):
        return None
    changed = []
    for name in (RUN_ID_FILE, NODE, EVENTS, NODE_LOG, OUTCOME):
        with contextlib.suppress(OSError):
            changed.append((node_dir / name).stat().st_mtime)
    beats = [read_beat(path) for path in node_dir.glob(f"{HEARTBEAT}/rank-*")]
    steps = [beat.step for beat in beats if beat]
    with contextlib.suppress(OSError):
        events = read_events(run_files.read_end(node_dir / EVENTS, EVENTS_TAIL_BYTES))
        steps += [event.step for event in events if isinstance(event.step, int)]
    return PreviousRun(heard_at=max(changed), step=max(steps, default=None))


def last_checkpoint(node_dir: Path) -> int | None:
    """Return the step of the last checkpoint that a rank of this node has saved or loaded, or None if unknown."""
    with contextlib.suppress(OSError):
        events = read_events(run_files.read_end(node_dir / EVENTS, EVENTS_TAIL_BYTES))
        steps = [event.step for event in events if event.event in ("checkpoint_saved", "checkpoint_loaded")]
        return steps[-1] if steps else None
    return None


@dataclass(frozen=True, kw_only=True)
class NodeDir:
    """A folder that belongs to this node for as long as ``lock_fd`` is open."""

    path: Path
    lock_fd: int
    previous_run: PreviousRun | None  # None on the first start
    requeues: Requeues | None  # only for a Slurm job, on node 0


def write_early_outcome(outcome: Outcome, run_dir: str | None, node_rank: str | None) -> None:
    """If a node could not start, write its outcome into its folder.

    Do nothing if the folder is unknown or locked.
    """
    if run_dir and node_rank and re.fullmatch(r"[0-9]{1,4}", node_rank):
        path = Path(run_dir) / node_name(int(node_rank))
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
            if not process_discovery.is_locked(path):  # else it belongs to another node
                outcome.write(path)


def claim_node_dir(config: NodeConfig, state: NodeState) -> NodeDir:
    """Create and lock the node's folder, and write node.json. Keep earlier rank logs. Raises NodeError."""
    try:
        run_dir = config.run_dir or Path(tempfile.mkdtemp(prefix="ddprun-"))
        path = run_dir / node_name(config.node_rank)
        path.mkdir(parents=True, exist_ok=True)
        lock_fd = process_discovery.take_lock(path)
        if lock_fd is None:
            hint = "give each node its own --node-rank, or this run its own --run-dir"
            raise config_error(f"{path} is used by another running ddprun", hint=hint)
        previous_run = read_previous_run(path, config.run_id)
        state.write(path)
    except OSError as error:
        message = f"the node's folder cannot be created: {error.filename}: {error.strerror}"
        raise node_error(Exit.CANNOT_WRITE, "unavailable", message) from None
    return NodeDir(path=path, lock_fd=lock_fd, previous_run=previous_run, requeues=count_requeues(config))


class Journal:
    """Writes the node's state (node.json), its events and its log lines."""

    def __init__(self, node_dir: Path, state: NodeState, console: Console) -> None:
        self._node_dir = node_dir
        self._lock = threading.Lock()
        self._events = EventLog(node_dir / EVENTS, node=state.node)
        self.state = state
        self.log = console.log
        self.emit = self._events.emit

    def update(self, **changes: Any) -> None:
        """Change fields of the state and write it. On a full disk, keep the old file and let the training continue."""
        with self._lock, contextlib.suppress(OSError):
            self.state = replace(self.state, **changes)
            self._events.attempt = self.state.attempt
            self.state.write(self._node_dir)
