"""How much of the gradients' way is hidden behind the backward pass: DDP's own measurement, of every hundredth step."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

NANO = 1e-9


class Overlap:
    """Asks DDP's logger now and then; a model without a wrapper has nothing to hide."""

    def __init__(self, model: nn.Module) -> None:
        inner = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        self._ddp = inner if isinstance(inner, DistributedDataParallel) else None

    def hidden_s(self) -> float:
        """Seconds of a step, on average of those that were sampled, in which gradients travelled beside it."""
        if self._ddp is None:
            return 0.0
        said = self._ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        return NANO * int(said.get("avg_backward_compute_comm_overlap_time", 0))
