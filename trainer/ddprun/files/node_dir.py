"""The node's folder: its lock, the files of an earlier start of the run, and the files that this node writes.

A queue starts a run again after a preemption, and Kubernetes starts a pod again after the loss of its machine. Then
``summary.json`` tells the next start, perhaps on another machine, the step and the ranks' counters. They continue, so
that goodput covers all starts of the run. Files of another run are removed. ``Requeues`` finds out whether a Slurm job
that is requeued makes progress.
"""

import contextlib
import json
import os
import re
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ddprun.files import process_discovery
from ddprun.files.runtime_dir import RuntimeDir
from ddprun.output.console import Console
from ddprun.settings.node_config import DEFAULT_RUN_ID, NodeConfig
from ddprun.system.errors import config_error, node_error
from ddprun.system.file_writer import FileWriter
from ddpwire import locks, run_files
from ddpwire.events import EVENTS, EVENTS_BEFORE, EventLog, read_last_events
from ddpwire.exits import Exit, worth_a_retry
from ddpwire.history import HISTORY
from ddpwire.run_files import LOCK, NODE, NODE_LOG, OUTCOME, SNAPSHOT, SUMMARY, NodeState, Outcome, node_name

LOCK_TIMEOUT_S = 3.0  # is_locked holds the lock for an instant, and processes of an earlier ddprun end within 2 s
EVENTS_TAIL_BYTES = 65536  # how much of the end of the events is searched for the highest step
MAX_WITHOUT_CHECKPOINT = 3  # starts of a Slurm job in a row
ANSWER_S = 3.0  # for the disk with the checkpoints; shorter than the silence after which a node counts as lost


@dataclass(frozen=True, kw_only=True)
class PreviousRun:
    """What an earlier start of the same run left on this node."""

    heard_at: float  # when it last wrote a file, in seconds since the epoch
    step: int | None  # the highest step of all attempts, if known
    counters: dict[str, Any] = field(default_factory=dict)  # of each rank (metrics.RankSeries.counts)


def read_previous_run(node_dir: Path, run_id: str) -> PreviousRun | None:
    """Return what an earlier start of the run left, or None if there was none. Raises OSError.

    Remove files that readers would take for files of this start.
    """
    previous_run = None
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        summary = run_files.parse_json(run_files.read_record(node_dir / SUMMARY))
        if summary["run"] == run_id != DEFAULT_RUN_ID:
            steps = [summary["step"]] if isinstance(summary["step"], int) else []
            steps += [event.step for event in read_last_events(node_dir, EVENTS_TAIL_BYTES) if event.step is not None]
            changed = [0.0]
            for name in (SUMMARY, NODE, EVENTS, NODE_LOG, OUTCOME):
                with contextlib.suppress(OSError):  # the earlier start may not have written all of them
                    changed.append((node_dir / name).stat().st_mtime)
            step, counters = max(steps, default=None), dict(summary["counters"])
            previous_run = PreviousRun(heard_at=max(changed), step=step, counters=counters)
    for name in (OUTCOME, SNAPSHOT, *(() if previous_run else (EVENTS, EVENTS_BEFORE, HISTORY))):
        (node_dir / name).unlink(missing_ok=True)
    return previous_run


def encode_summary(run_id: str, state: str, step: int | None, counters: dict[str, Any]) -> bytes:
    """Return the content of summary.json."""
    return f"{json.dumps({'run': run_id, 'state': state, 'step': step, 'counters': counters})}\n".encode()


def last_checkpoint(node_dir: Path) -> int | None:
    """Return the step of the last checkpoint that a rank of this node has saved or loaded, or None if unknown."""
    events = read_last_events(node_dir, EVENTS_TAIL_BYTES)
    steps = [event.step for event in events if event.event in ("checkpoint_saved", "checkpoint_loaded")]
    return steps[-1] if steps else None


class Requeues:
    """The starts of a Slurm job that is requeued. Node 0 counts them in the file ``attempts`` in the run's folder.

    Each line has the time and the name of the newest checkpoint at a start. If three starts in a row have written no
    new checkpoint, the job is not requeued, because a further start would most likely write none either.
    """

    def __init__(self, run_dir: Path, checkpoint_dir: Path, *, is_first: bool, files: FileWriter) -> None:
        """Record this start.

        If the earlier starts cannot be read, the count begins anew. If this start cannot be recorded, nothing is
        counted.
        """
        self._checkpoint_dir, self._files = checkpoint_dir, files
        self._newest: Future[str] | None = None  # the answer to the last question to the disk, and when it was asked
        self._asked_at = 0.0
        path = run_dir / "attempts"
        self._marks: list[str] = []
        with contextlib.suppress(OSError, ValueError):
            if not is_first:
                self._marks = path.read_text().splitlines()
        try:
            self._marks.append(newest_checkpoint(checkpoint_dir))
            run_files.write_atomic(path, ("\n".join(self._marks) + "\n").encode())
        except OSError:
            self._marks = []

    def is_ready(self) -> bool:
        """Return whether ``limit`` may be called. A disk that does not answer within ANSWER_S counts as unknown.

        Nothing waits for the disk, because the thread that asks also sends this node's heartbeats.
        """
        if self._newest is None:
            self._asked_at = time.monotonic()
            self._newest = self._files.submit(newest_checkpoint, self._checkpoint_dir)
        return self._newest.done() or time.monotonic() > self._asked_at + ANSWER_S

    def limit(self, outcome: Outcome) -> Outcome:
        """Return the outcome. After too many starts without a new checkpoint, change it to "gave_up"."""
        newest, self._newest = self._newest, None
        last = self._marks[-MAX_WITHOUT_CHECKPOINT:]
        is_full = worth_a_retry(outcome.code) and len(last) == MAX_WITHOUT_CHECKPOINT
        if is_full and newest and newest.done() and not newest.exception() and {*last} == {newest.result()}:
            reason = f"{MAX_WITHOUT_CHECKPOINT} starts in a row wrote no new checkpoint"
            message = f"gave up, because {reason}; the last start: {outcome.message}"
            return replace(outcome, code=Exit.GAVE_UP, cause="gave_up", message=message, retry=False)
        return outcome


def count_requeues(config: NodeConfig, files: FileWriter) -> Requeues | None:
    """If this is node 0 of a Slurm job, record this start of the job and its step.

    The batch script sends signals to the step. Return None on other nodes, outside Slurm, and if the run has no folder.
    """
    if config.node_rank or config.run_dir is None or config.slurm_job is None:
        return None
    with contextlib.suppress(OSError):
        run_files.write_atomic(config.run_dir / run_files.STEP, config.slurm_step.encode())
    checkpoints = Path(config.checkpoint_dir) if config.checkpoint_dir else config.run_dir / run_files.CHECKPOINTS
    return Requeues(config.run_dir, checkpoints, is_first=config.num_requeues == 0, files=files)


def newest_checkpoint(folder: Path) -> str:
    """Return the time and the name of the file that was written last, or an empty string. Raises OSError."""
    newest = (0, "")
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.name.startswith("."):
                newest = max(newest, (path.stat().st_mtime_ns, str(path.relative_to(folder))))
    return f"{newest[0]} {newest[1]}" if newest[1] else ""


@dataclass(frozen=True, kw_only=True)
class NodeDir:
    """A folder that belongs to this node for as long as ``lock_fd`` is open."""

    path: Path
    lock_fd: int
    has_locks: bool  # whether the file system has locks; without them, an owner record shows that this node is alive
    runtime: RuntimeDir
    previous_run: PreviousRun | None  # None on the first start
    requeues: Requeues | None  # only for a Slurm job, on node 0

    @property
    def previous_step(self) -> int | None:
        """The highest step of the earlier starts of the run, or None."""
        return self.previous_run.step if self.previous_run else None


def write_early_outcome(outcome: Outcome, run_dir: str | None, node_rank: str | None) -> None:
    """If a node could not start, write its outcome into its folder.

    Do nothing if the folder is unknown or locked.
    """
    if run_dir and node_rank and re.fullmatch(r"[0-9]{1,4}", node_rank):
        path = Path(run_dir) / node_name(int(node_rank))
        with contextlib.suppress(OSError):  # the error that ended the node has been printed
            path.mkdir(parents=True, exist_ok=True)
            if not process_discovery.is_locked(path):  # else it belongs to another node
                outcome.write(path)


def claim_node_dir(config: NodeConfig, state: NodeState, files: FileWriter) -> NodeDir:
    """Create and lock the node's folder, and write node.json. Keep earlier rank logs. Raises NodeError."""
    try:
        run_dir = config.run_dir or Path(tempfile.mkdtemp(prefix="ddprun-"))
        path = run_dir / node_name(config.machine)
        path.mkdir(parents=True, exist_ok=True)
        lock_fd, has_locks = _lock(path)
        before = read_previous_run(path, config.run_id)
        runtime = RuntimeDir(config.run_id, config.node_rank, os.environ)
        known = (before.step, before.counters) if before else (None, {})
        run_files.write_atomic(path / SUMMARY, encode_summary(config.run_id, state.state, *known))
        replace(state, runtime=str(runtime.path)).write(path)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error
        message = f"the node's folder cannot be created: {reason}"
        raise node_error(Exit.CANNOT_WRITE, "unavailable", message) from None
    requeues = count_requeues(config, files)
    return NodeDir(
        path=path, lock_fd=lock_fd, has_locks=has_locks, runtime=runtime, previous_run=before, requeues=requeues
    )


def _lock(path: Path) -> tuple[int, bool]:
    """Lock the node's folder. Return the descriptor, and whether there are locks. Raises OSError and NodeError."""
    lock = path / LOCK
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    state, user = locks.lock(descriptor, lock, wait_s=LOCK_TIMEOUT_S), ""
    if state is locks.Lock.UNSUPPORTED:
        owner = locks.read_owner(lock)
        user = f": process {owner.pid} on {owner.host}" if owner else ""
        seen = f"; waiting at most {locks.SILENT_S:g} s for a sign of its owner{user}" if owner else ""
        warning = f"the file system of {path} has no file locks: {lock.name}{locks.OWNER_SUFFIX} replaces them"
        print(f"ddprun: {warning}{seen}", file=sys.stderr, flush=True)
        if locks.owner_that_writes(lock):
            state = locks.Lock.BUSY
        else:
            locks.Owner.of_this_process().write(lock)
    if state is locks.Lock.BUSY:
        hint = "give each node its own --node-rank, or this run its own --run-dir"
        raise config_error(f"{path} is used by another running ddprun{user}", hint=hint)
    return descriptor, state is locks.Lock.TAKEN


class Journal:
    """Writes the node's state (node.json), its events and its log lines."""

    def __init__(self, node_dir: Path, state: NodeState, console: Console, files: FileWriter) -> None:
        self._node_dir, self._files = node_dir, files
        self._lock = threading.Lock()
        self._events = EventLog(node_dir / EVENTS, node=state.node)
        self._events.append = partial(files.submit, run_files.append_bounded)
        self.state = state
        self.log = console.log
        self.emit = self._events.emit

    def update(self, **changes: Any) -> None:
        """Change fields of the state and write it. On a full disk, keep the old file and let the training continue."""
        with self._lock:
            self.state = replace(self.state, **changes)
            self._events.attempt, self._events.node = self.state.attempt, self.state.node
            self._files.submit(self.state.write, self._node_dir)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node: its settings, its folder, and the objects that write into the folder and to the terminal."""

    config: NodeConfig
    folder: NodeDir
    journal: Journal
    console: Console
    files: FileWriter
