"""What is seen of a training, and how long it may go on."""

from dataclasses import dataclass
from pathlib import Path

from ddptrain.options.field import option, real, whole


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """What is seen of it."""

    profile: int = option(
        "trace N steps of every rank, for https://ui.perfetto.dev; 0: none", type=whole(0), default=0, metavar="N"
    )
    profile_dir: Path = option("where the traces go", type=Path, default=Path("profile"), metavar="DIR")
    debug: bool = option(
        "have torch tell more, record the last collectives and show where a failed gradient came from; slow",
        default=False,
    )
    stop_after: float = option(
        "save and stop with exit code 143 after T minutes; 0: never. ddprun's --deadline does so for any script",
        type=real(0.0),
        default=0.0,
        metavar="T",
    )
