"""Where a training starts: at step 0, or from a checkpoint that rank 0 chooses for all."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.checkpoint import Checkpoint, Corrupt, load, manifest_of, unpack
from ddptrain.errors import TrainError
from ddptrain.metrics import Metrics
from ddptrain.options.checkpoints import CheckpointOptions
from ddptrain.shelf import SUFFIX_BAD, Shelf, step_of
from ddpwire import names
from ddpwire.exits import Exit


@dataclass(frozen=True, kw_only=True)
class Finder:
    """Looks for the checkpoint to go on from. ``warn`` is told in a line what was passed over."""

    shelf: Shelf
    options: CheckpointOptions
    metrics: Metrics
    warn: Callable[[str], None]

    def find(self, shaping: Mapping[str, Any]) -> tuple[Path, Checkpoint] | None:
        """What ``--resume`` says; None: nothing is there, start at step 0. Raises TrainError."""
        resume = self.options.resume
        started_again = os.environ.get(names.ATTEMPT, "1") != "1" and self.shelf.checkpoints()
        if resume not in ("auto", "never") and not started_again:
            found: tuple[Path, Checkpoint] | None = self._given(Path(resume))
        else:
            paths = self.shelf.checkpoints()
            if resume == "never" and paths and not started_again:
                raise TrainError(
                    Exit.CONFIG,
                    f"--resume never, but {self.shelf.folder} holds {paths[0].name}: "
                    "give another --checkpoint-dir, or --resume auto",
                )
            found = self._newest(paths)
        if found is not None:
            self._same_training(*found, shaping)
        return found

    def _newest(self, paths: list[Path]) -> tuple[Path, Checkpoint] | None:
        """The first that is whole. Those before it are set aside; if none is, all stay for a person to look at."""
        bad: dict[Path, str] = {}
        for path in paths:
            try:
                checkpoint = self._load(path)
            except (Corrupt, OSError) as error:
                bad[path] = _reason(error)
                continue
            for torn, reason in bad.items():
                self.warn(f"{torn} {self.shelf.set_aside(torn)}: {reason}")
                self.metrics.fell_back()
            return path, checkpoint
        for torn, reason in bad.items():
            self.warn(f"{torn} cannot be used: {reason}")
        count = len(bad) + self.shelf.num_bad()
        if count:
            raise TrainError(
                Exit.DATA,
                f"none of the {count} checkpoints in {self.shelf.folder} is whole: to start at step 0, delete them "
                f"(also step-*{SUFFIX_BAD}) or give another --checkpoint-dir",
            )
        return None

    def _given(self, path: Path) -> tuple[Path, Checkpoint]:
        """The one that was asked for by name; without a manifest its bytes are taken as they are."""
        if not path.name:
            raise TrainError(
                Exit.NO_INPUT, f"--resume {self.options.resume!r} is no file; auto, never or a file are allowed"
            )
        try:
            found = unpack(path.read_bytes()) if not manifest_of(path).exists() else self._load(path)
        except Corrupt as error:
            missing = error.reason == "missing"
            raise TrainError(Exit.NO_INPUT if missing else Exit.DATA, f"--resume {path}: {error}") from None
        except OSError as error:
            raise TrainError(
                Exit.NO_INPUT, f"--resume {path}: {error.strerror}; auto, never or a file are allowed"
            ) from None
        newer = [other for other in self.shelf.checkpoints() if (step_of(other) or 0) > found.step]
        if newer:  # they would be taken for this training's, and this one's be deleted as older ones
            raise TrainError(
                Exit.CONFIG,
                f"--resume {path} is of step {found.step}, and {self.shelf.folder} holds {newer[0].name}: "
                "give another --checkpoint-dir for the new branch",
            )
        return path, found

    def _load(self, path: Path) -> Checkpoint:
        began = time.monotonic()
        try:
            checkpoint = load(path)
            if step_of(path) not in (None, checkpoint.step):
                raise Corrupt("corrupt", f"its name is not that of step {checkpoint.step}, which is in it")
        except (Corrupt, OSError) as error:
            self.metrics.checkpoint_failed(op="load", reason=error.reason if isinstance(error, Corrupt) else "io")
            raise
        self.metrics.loaded(seconds=time.monotonic() - began)
        return checkpoint

    def _same_training(self, path: Path, checkpoint: Checkpoint, now: Mapping[str, Any]) -> None:
        """Refuse to go on with another training: the weights would be neither's. Raises TrainError."""
        before = checkpoint.shaping
        changed = [name for name in now if name in before and before[name] != now[name]]
        if not changed:
            return
        told = ", ".join(f"{name.replace('_', '-')} {before[name]}, not {now[name]}" for name in changed)
        if not self.options.allow_changed:
            self.metrics.checkpoint_failed(op="load", reason="incompatible")
            raise TrainError(
                Exit.CONFIG,
                f"{path} was trained with {told}: give the same options, another --checkpoint-dir, "
                "or --allow-changed-config",
            )
        self.warn(f"{path} was trained with {told}; going on (--allow-changed-config)")


def _reason(error: Exception) -> str:
    return str(error.strerror) if isinstance(error, OSError) else str(error)
