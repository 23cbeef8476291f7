"""Where a training is kept, and gone on from."""

from dataclasses import dataclass
from pathlib import Path

from ddptrain.options.field import option, whole


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
        "also save every N steps; 0: only at the end of an epoch",
        flag="--checkpoint-every",
        type=whole(0),
        default=0,
        metavar="N",
    )
    keep: int = option("newest checkpoints to keep; 0: all", type=whole(0), default=3, metavar="N")
    resume: str = option(
        "auto: go on from the newest that loads; never: start anew, in a folder without any; PATH: from this file",
        default="auto",
        metavar="auto|never|PATH",
    )
