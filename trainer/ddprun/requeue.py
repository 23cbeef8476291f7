"""Whether a Slurm job that is put into the queue again makes progress.

The batch script puts the job into the queue again when the outcome says ``retry``. Node 0 writes, at each start of the
job, the newest checkpoint into the file ``attempts`` of the run's folder. If that of three starts in a row is still the
newest when the third one ends, another start would most likely leave none either.
"""

import contextlib
from dataclasses import replace
from pathlib import Path

from ddprun.node_config import NodeConfig
from ddpwire.exits import Exit
from ddpwire.run_files import CHECKPOINTS, Outcome, write_atomic

ATTEMPTS = "attempts"
MAX_WITHOUT_CHECKPOINT = 3  # starts in a row


class Requeues:
    """The starts of this job, as node 0 counts them."""

    def __init__(self, run_dir: Path, checkpoint_dir: Path, *, is_first: bool) -> None:
        """Record this start. What cannot be read or written is not counted."""
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
        """Return the outcome of this start: given up instead of ``retry`` after too many without a new checkpoint."""
        if not outcome.retry or not self._in_vain():
            return outcome
        message = (
            f"gave up: {MAX_WITHOUT_CHECKPOINT} starts in a row left no new checkpoint; the last: {outcome.message}"
        )
        return replace(outcome, code=Exit.GAVE_UP, cause="gave_up", message=message, retry=False)

    def _in_vain(self) -> bool:
        last = self._marks[-MAX_WITHOUT_CHECKPOINT:]
        with contextlib.suppress(OSError):  # else it is not known
            return len(last) == MAX_WITHOUT_CHECKPOINT and {*last} == {newest_checkpoint(self._checkpoint_dir)}
        return False


def count_requeues(config: NodeConfig) -> Requeues | None:
    """Record this start on node 0 of a Slurm job; None: on other nodes, under other launchers, without a run folder."""
    if config.node_rank or config.run_dir is None or config.slurm_job is None:
        return None
    checkpoints = Path(config.checkpoint_dir) if config.checkpoint_dir else config.run_dir / CHECKPOINTS
    return Requeues(config.run_dir, checkpoints, is_first=config.num_requeues == 0)


def newest_checkpoint(folder: Path) -> str:
    """Return the time and the name of the file that was written last; empty: there is none. Raises OSError."""
    newest = (0, "")
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.name.startswith("."):
                newest = max(newest, (path.stat().st_mtime_ns, str(path.relative_to(folder))))
    return f"{newest[0]} {newest[1]}" if newest[1] else ""
