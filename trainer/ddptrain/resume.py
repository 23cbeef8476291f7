"""Where a training starts: at step 0, or from a checkpoint that rank 0 chooses for all."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddptrain.checkpoint import Checkpoint, Corrupt, list_checkpoints, load
from ddptrain.errors import TrainError
from ddptrain.metrics import Metrics
from ddpwire.exits import Exit


def find(resume: str, folder: Path, shaping: Mapping[str, Any], metrics: Metrics) -> tuple[Path, Checkpoint] | None:
    """What ``--resume`` says to go on from; None: nothing is there, start at step 0. Rank 0 only. Raises TrainError."""
    if resume not in ("auto", "never"):
        found = _given(Path(resume), metrics)
    else:
        paths = list_checkpoints(folder)
        if resume == "never" and paths:
            raise TrainError(
                Exit.CONFIG,
                f"--resume never, but {folder} holds {paths[0].name}: give another --checkpoint-dir, or --resume auto",
            )
        if not paths:
            return None
        found = _newest(paths, metrics)
    path, checkpoint = found
    _same_training(path, checkpoint.shaping, shaping)
    return found


def _newest(paths: list[Path], metrics: Metrics) -> tuple[Path, Checkpoint]:
    """The first that loads."""
    for path in paths:
        try:
            return path, _timed_load(path, metrics)
        except (Corrupt, OSError) as error:
            print(f"ddptrain: warning: {path} is skipped: {_reason(error)}", file=sys.stderr)
    raise TrainError(
        Exit.DATA,
        f"none of the {len(paths)} checkpoints in {paths[0].parent} can be read: to start at step 0, delete them "
        "or give another --checkpoint-dir",
    )


def _given(path: Path, metrics: Metrics) -> tuple[Path, Checkpoint]:
    """The one that was asked for by name."""
    try:
        return path, _timed_load(path, metrics)
    except Corrupt as error:
        raise TrainError(Exit.DATA, f"--resume {path}: {error}") from None
    except OSError as error:
        raise TrainError(
            Exit.NO_INPUT, f"--resume {path}: {error.strerror}; auto, never or a file are allowed"
        ) from None


def _timed_load(path: Path, metrics: Metrics) -> Checkpoint:
    start = time.monotonic()
    try:
        checkpoint = load(path)
    except (Corrupt, OSError) as error:
        metrics.checkpoint_failed(op="load", reason="corrupt" if isinstance(error, Corrupt) else "io")
        raise
    metrics.loaded(seconds=time.monotonic() - start)
    return checkpoint


def _same_training(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with another training: the weights would be neither's. Raises TrainError."""
    changed = [name for name in now if name in before and before[name] != now[name]]
    if changed:
        told = ", ".join(f"{name.replace('_', '-')} {before[name]}, not {now[name]}" for name in changed)
        raise TrainError(
            Exit.CONFIG, f"{path} was trained with {told}: give the same options, or another --checkpoint-dir"
        )


def _reason(error: Exception) -> str:
    return str(error.strerror) if isinstance(error, OSError) else str(error)
