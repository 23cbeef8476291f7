"""What a model must know of a data set."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ImageShape:
    """Square images of some classes."""

    channels: int
    size_px: int
    classes: int
