"""What this rank has to tell Prometheus: the metrics of ddpwire.rank_catalogue. Here, to nobody.

Under ddprun, which names a folder for them, ``open_metrics`` gives one that writes them (exported.py); elsewhere
nothing is done and nothing is imported.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ddpwire import names


@dataclass(frozen=True, kw_only=True)
class About:
    """What is going to be trained."""

    backend: str  # how gradients travel; none: one rank
    device: str
    model: str
    dataset: str
    num_steps: int
    flops_a_sample: int  # of a training step; 0: nobody can say


class Metrics:
    """What the trainer has to tell."""

    on = False  # whether anybody hears it

    def about(self, about: About) -> None:
        """What is going to be trained."""

    def step(self, *, step: int, epoch: int, samples: int, lr: float) -> None:
        """An optimizer step was taken."""

    def took(self, seconds: float) -> None:
        """So long did a step take, that step or one before it."""

    def times(self, phases: Mapping[str, float], productive_s: float, lost: Mapping[str, float]) -> None:
        """Seconds since the start: of the steps by phase, of what they brought, of what was none by cause."""

    def before(self, lost: Mapping[str, float]) -> None:
        """Seconds by cause that were lost before this process was started."""

    def hidden(self, seconds: float) -> None:
        """So much more of the gradients' way was hidden behind the backward pass."""

    def flush(self) -> None:
        """Have all in the files."""

    def epoch(self, *, loss: float, accuracy: float, grad_norm: float) -> None:
        """An epoch ended."""

    def skew(self, ratio: float, speed: float) -> None:
        """How the slowest rank compares, and this one."""

    def memory(self, **kinds: int) -> None:
        """Bytes on the GPU."""

    def nonfinite(self, where: str) -> None:
        """A number of this rank is none."""

    def data_error(self, kind: str) -> None:
        """A file of the data set is missing or corrupt."""

    def timed_out(self) -> None:
        """The other ranks were waited for in vain."""

    def out_of_memory(self) -> None:
        """The GPU has no more memory."""

    def saved(self, *, step: int, seconds: float, size_bytes: int, retained: int) -> None:
        """A checkpoint was written."""

    def loaded(self, *, seconds: float) -> None:
        """A checkpoint was read."""

    def fell_back(self) -> None:
        """A checkpoint was set aside for an older one."""

    def checkpoint_failed(self, *, op: str, reason: str) -> None:
        """A checkpoint could not be written or read; the values are the catalogue's."""


def open_metrics(environ: Mapping[str, str], *, first: bool) -> Metrics:
    """Exported ones under ddprun; elsewhere, and where the files cannot be written, ones that do nothing.

    ``first``: of the rank that tells what is the same for all.
    """
    if not environ.get(names.PROMETHEUS_MULTIPROC_DIR):
        return Metrics()
    try:
        from ddptrain.exported import Exported
        from ddptrain.exported_first import ExportedFirst

        return ExportedFirst() if first else Exported()
    except (ImportError, OSError) as error:
        print(f"ddptrain: training without metrics: {error}", file=sys.stderr)
        return Metrics()
