"""Where a training is kept, when, and gone on from."""

from dataclasses import dataclass
from pathlib import Path

from ddptrain.options.field import option, real, whole


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The checkpoints."""

    folder: Path = option(
        "where they are kept; rank 0 writes them",
        flag="--checkpoint-dir",
        type=Path,
        default=Path("checkpoints"),
        metavar="DIR",
    )
    every: int = option(
        "also save every N steps; 0: only at the end of an epoch and when a signal asks to stop",
        flag="--checkpoint-every",
        type=whole(0),
        default=0,
        metavar="N",
    )
    minutes: float = option(
        "also save when the last one is T minutes old; 0: never for that",
        flag="--checkpoint-minutes",
        type=real(0.0),
        default=0.0,
        metavar="T",
    )
    keep: int = option("newest checkpoints to keep; 0: all", type=whole(0), default=3, metavar="N")
    keep_best: bool = option("keep the one of the highest test accuracy too", default=True)
    resume: str = option(
        "auto: go on from the newest that is whole; never: start anew, in a folder without any; PATH: from this file",
        default="auto",
        metavar="auto|never|PATH",
    )
    allow_changed: bool = option(
        "go on though options that shape the weights have changed",
        flag="--allow-changed-config",
        default=False,
    )
