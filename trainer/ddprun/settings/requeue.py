"""Checks whether a Slurm job that is requeued makes progress.

At each start of the job, node 0 adds the time and name of the newest checkpoint to the file ``attempts`` in the run's
folder. If three starts in a row have written no new checkpoint, the job is not requeued, because a further start would
most likely write none either. Node 0 also writes the number of its step, to which the batch script sends signals.
"""

import contextlib
from dataclasses import replace
from pathlib import Path

from ddprun.settings.node_config import NodeConfig
from ddpwire.exits import Exit, worth_a_retry
from ddpwire.run_files import CHECKPOINTS, STEP, Outcome, write_atomic

ATTEMPTS = "attempts"
MAX_WITHOUT_CHECKPOINT = 3  # starts in a row


class Requeues:
    """The starts of a Slurm job, which node 0 counts."""

    def __init__(self, run_dir: Path, checkpoint_dir: Path, *, is_first: bool) -> None:
        """Record this start.

        If the earlier starts cannot be read, the count begins anew. If this start cannot be recorded, nothing is
        counted.
        """
        self._checkpoint_dir = checkpoint_dir
        path = run_dir / ATTEMPTS
        self._marks: list[str] = []
        with contextlib.suppress(OSError, ValueError):
            if not is_first:
                self._marks = path.read_text().splitlines()
        try:
            self._marks.append(newest_checkpoint(checkpoint_dir))
            write_atomic(path, ("\n".join(self._marks) + "\n").encode())
        except OSError:
            self._marks = []

    def limit(self, outcome: Outcome) -> Outcome:
        """Return the outcome. After too many starts without a new checkpoint, change it to "gave_up"."""
        last = self._marks[-MAX_WITHOUT_CHECKPOINT:]
        if worth_a_retry(outcome.code) and len(last) == MAX_WITHOUT_CHECKPOINT:
            with contextlib.suppress(OSError):  # if the folder cannot be read, the progress is unknown
                if {*last} == {newest_checkpoint(self._checkpoint_dir)}:
                    what = f"{MAX_WITHOUT_CHECKPOINT} starts in a row wrote no new checkpoint"
                    message = f"gave up, because {what}; the last start: {outcome.message}"
                    return replace(outcome, code=Exit.GAVE_UP, cause="gave_up", message=message, retry=False)
        return outcome


def count_requeues(config: NodeConfig) -> Requeues | None:
    """If this is node 0 of a Slurm job, record this start of the job and its step.

    Return None on other nodes, outside Slurm, and if the run has no folder.
    """
    if config.node_rank or config.run_dir is None or config.slurm_job is None:
        return None
    with contextlib.suppress(OSError):
        (config.run_dir / STEP).write_text(config.slurm_step)
    checkpoints = Path(config.checkpoint_dir) if config.checkpoint_dir else config.run_dir / CHECKPOINTS
    return Requeues(config.run_dir, checkpoints, is_first=config.num_requeues == 0)


def newest_checkpoint(folder: Path) -> str:
    """Return the time and the name of the file that was written last, or an empty string. Raises OSError."""
    newest = (0, "")
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.name.startswith("."):
                newest = max(newest, (path.stat().st_mtime_ns, str(path.relative_to(folder))))
    return f"{newest[0]} {newest[1]}" if newest[1] else ""
