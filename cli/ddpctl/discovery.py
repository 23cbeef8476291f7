"""Where Prometheus finds the runs: files in ``.targets`` beside the runs' folders, one file_sd file a run.

Nodes on this machine, and Slurm's batch script, write theirs by themselves; those of nodes elsewhere are written here,
whenever a run's status is asked for. Of a run that has ended they are taken away. A Kubernetes cluster has discovery
of its own.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from ddpctl.run import Run, RunStatus
from ddpwire.folder import write_atomic
from ddpwire.targets import TARGETS, Target, file_name, is_of, text

KINDS = ("ssh", "slurm")  # of a run elsewhere, whose nodes are reached at the addresses that they say


def keep(root: Path, runs: Iterable[tuple[Run, RunStatus]]) -> None:
    """Make the files say what was found out. One that cannot be written keeps nobody from a run's status."""
    folder = root / TARGETS
    for run, status in runs:
        with contextlib.suppress(OSError):
            if status.ended:
                _forget(folder, run.name)
            elif run.elsewhere and run.kind in KINDS:
                _write(folder, run, status)


def _write(folder: Path, run: Run, status: RunStatus) -> None:
    targets = [
        Target(url=report.state.metrics, job_id=run.name, node=report.node, launcher=run.kind)
        for report in status.nodes
        if report.alive and report.state and report.state.metrics
    ]
    path, said = folder / file_name(run.name), text(targets)
    if targets and not (path.exists() and path.read_text() == said):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, said.encode())
        path.chmod(0o644)  # Prometheus is another user


def _forget(folder: Path, run: str) -> None:
    if folder.is_dir():
        for path in folder.iterdir():
            if is_of(path.name, run):
                path.unlink(missing_ok=True)
