"""What is trained on, and how it reaches the model."""

from dataclasses import dataclass
from pathlib import Path

from ddptrain.options.field import image_shape, option, whole

DATA = ("digits", "mnist", "cifar10", "cifar100", "folder", "synthetic")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The data set, where it is, and on which path its images go."""

    name: str = option("data set: %(choices)s", flag="--data", shapes=True, default="digits", choices=DATA)
    folder: Path = option(
        "where mnist, cifar10 and cifar100 are read, and downloaded to if they are not there; for folder: holds "
        "CLASS/*.png or *.jpg, or these under train and val",
        flag="--data-dir",
        type=Path,
        default=Path("data"),
        metavar="DIR",
    )
    image_size: int = option(
        "for folder: images are cut to squares of so many pixels", shapes=True, type=whole(1), default=224, metavar="PX"
    )
    cache: Path | None = option(
        "for folder: where decoded images are kept, 3 bytes a pixel (default: .ddptrain in --data-dir)",
        flag="--cache-dir",
        type=Path,
        default=None,
        metavar="DIR",
    )
    synthetic_samples: int = option(
        "training images of the synthetic data", shapes=True, type=whole(1), default=4096, metavar="N"
    )
    synthetic_shape: tuple[int, int, int] = option(
        "their channels, height and width", shapes=True, type=image_shape, default=(1, 28, 28), metavar="CxHxW"
    )
    synthetic_classes: int = option("their classes", shapes=True, type=whole(2), default=10, metavar="N")
    input: str = option(
        "device: all images on the device as bytes; loader: read by worker processes; auto: on the device where they "
        "fit. The order and the augmentation are the same",
        choices=("auto", "device", "loader"),
        default="auto",
    )
    workers: int = option("of the loader, a rank", type=whole(1), default=2, metavar="N")
