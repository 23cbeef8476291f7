"""How long, how many at once, and towards what."""

from dataclasses import dataclass
from pathlib import Path

from ddptrain.options.field import option, real, whole


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The steps, their batches and their loss."""

    epochs: int = option(
        "times through the training images; 0: only evaluate the checkpoint", type=whole(0), metavar="N"
    )
    batch_size: int = option(
        "images an optimizer step, over ALL ranks together", shapes=True, type=whole(1), metavar="N"
    )
    batch_size_per_rank: int = option(
        "images a step on each rank, in place of --batch-size; 0: --batch-size holds",
        type=whole(0),
        default=0,
        metavar="N",
    )
    accumulate: int = option(
        "parts that a rank takes its images of a step in, one after the other: less memory, the same gradient",
        shapes=True,
        type=whole(1),
        default=1,
        metavar="N",
    )
    label_smoothing: float = option("0 to under 1; 0: none", shapes=True, type=real(0, 1), default=0.0, metavar="X")
    ema: float = option(
        "evaluate a moving average of the weights that keeps this share a step, such as 0.999; 0: the weights",
        shapes=True,
        type=real(0, 1),
        default=0.0,
        metavar="X",
    )
    test_flip: bool = option("evaluate each image and its mirror image together", default=False)
    tensorboard: Path | None = option("write scalars of each epoch there", type=Path, default=None, metavar="DIR")
    seed: int = option(
        "of the weights, the order and the augmentation", shapes=True, type=whole(0), default=0, metavar="N"
    )
