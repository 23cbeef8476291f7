"""Checks whether a Slurm job that is requeued makes progress.

At each start of the job, node 0 adds the time and name of the newest checkpoint to the file ``attempts`` in the run's
folder. If three starts in a row have written no new checkpoint, the job is not requeued, because a further start would
most likely write none either. Node 0 also writes the number of its step, to which the batch script sends signals.
"""

import contextlib
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from ddprun.settings.node_config import NodeConfig
from ddprun.system.file_writer import FileWriter
from ddpwire.exits import Exit, worth_a_retry
from ddpwire.run_files import CHECKPOINTS, STEP, Outcome, write_atomic

MAX_WITHOUT_CHECKPOINT = 3  # starts in a row
ANSWER_S = 3.0


class Requeues:
    """The starts of a Slurm job, which node 0 counts."""

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
            write_atomic(path, ("\n".join(self._marks) + "\n").encode())
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

    Return None on other nodes, outside Slurm, and if the run has no folder.
    """
    if config.node_rank or config.run_dir is None or config.slurm_job is None:
        return None
    with contextlib.suppress(OSError):
        write_atomic(config.run_dir / STEP, config.slurm_step.encode())
    checkpoints = Path(config.checkpoint_dir) if config.checkpoint_dir else config.run_dir / CHECKPOINTS
    return Requeues(config.run_dir, checkpoints, is_first=config.num_requeues == 0, files=files)


def newest_checkpoint(folder: Path) -> str:
    """Return the time and the name of the file that was written last, or an empty string. Raises OSError."""
    newest = (0, "")
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.name.startswith("."):
                newest = max(newest, (path.stat().st_mtime_ns, str(path.relative_to(folder))))
    return f"{newest[0]} {newest[1]}" if newest[1] else ""
