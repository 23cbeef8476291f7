"""How training images are changed each time they are seen."""

from dataclasses import dataclass

from ddptrain.options.field import option, real, whole


@dataclass(frozen=True, kw_only=True)
class AugmentationOptions:
    """Each change is drawn from the seed, the epoch and the sample: it is the same on any number of ranks."""

    augment: bool = option("the changes of this group, or none", shapes=True, default=True)
    shift: int | None = option(
        "crops of images padded by so many black pixels (default: the data set's: digits 1, cifar10 and cifar100 4)",
        shapes=True,
        type=whole(0),
        default=None,
        metavar="PX",
    )
    flip: bool | None = option(
        "mirror half of them (default: the data set's: cifar10, cifar100, folder)",
        shapes=True,
        boolean=True,
        default=None,
    )
    cutout: int = option(
        "a grey square of this side in each; 0: none", shapes=True, type=whole(0), default=0, metavar="PX"
    )
    erase: float = option(
        "share of images with a grey rectangle of 2 to 33 %% of their area",
        shapes=True,
        type=real(0, 1.001),
        default=0.0,
        metavar="X",
    )
    mixup: float = option(
        "blend each with another one, by Beta(X, X); 0: not", shapes=True, type=real(0), default=0.0, metavar="X"
    )
    cutmix: float = option(
        "paste a rectangle of another one into each, by Beta(X, X); 0: not; with --mixup: one or the other",
        shapes=True,
        type=real(0),
        default=0.0,
        metavar="X",
    )
