# ruff: noqa: N803, N815 - tensors carry their shape in their name
"""All samples on the device at once: a batch is a gather."""

from dataclasses import dataclass

from torch import Tensor

from ddptrain.input.batches import Fetched, Mark
from ddptrain.input.pixels import Pixels


@dataclass(frozen=True, kw_only=True)
class DeviceFeed:
    """Samples that were moved to the device."""

    pixels: Pixels
    labels_N: Tensor
    told: str

    def fetch(self, indices_B: Tensor, *, epoch: int, mark: Mark) -> Fetched:  # noqa: ARG002 - a loader needs them
        """Samples of the training set."""
        return Fetched(pixels=self.pixels, index_B=indices_B, labels_B=self.labels_N[indices_B])

    def rewind(self) -> None:
        """All are at hand."""
