"""What is trained on."""

from dataclasses import dataclass
from pathlib import Path

from ddptrain.options.field import image_shape, option, whole

DATA = ("digits", "mnist", "cifar10", "synthetic")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The data set, and where it is."""

    name: str = option("data set: %(choices)s", flag="--data", shapes=True, default="digits", choices=DATA)
    folder: Path = option(
        "where mnist and cifar10 are read, and downloaded to if they are not there",
        flag="--data-dir",
        type=Path,
        default=Path("data"),
        metavar="DIR",
    )
    synthetic_samples: int = option(
        "training images of the synthetic data", shapes=True, type=whole(1), default=4096, metavar="N"
    )
    synthetic_shape: tuple[int, int, int] = option(
        "their channels, height and width", shapes=True, type=image_shape, default=(1, 28, 28), metavar="CxHxW"
    )
    synthetic_classes: int = option("their classes", shapes=True, type=whole(2), default=10, metavar="N")
    augment: bool = option("change training images a little each time they are seen", shapes=True, default=True)
