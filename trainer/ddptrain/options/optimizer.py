"""How a gradient becomes a step."""

from dataclasses import dataclass

from ddptrain.options.field import option, real

SCHEDULES = ("one-cycle", "cosine")


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer and its learning rate."""

    lr: float = option("peak learning rate of SGD with Nesterov momentum", shapes=True, type=real(0.0), metavar="X")
    scale_lr: bool = option("multiply --lr by the number of ranks", shapes=True, default=False)
    schedule: str = option(
        "learning rate over the steps: up for 30 %% of them and down to 0, or only down (%(choices)s)",
        shapes=True,
        choices=SCHEDULES,
        default="one-cycle",
    )
    momentum: float = option("0 to under 1; 0: plain SGD", shapes=True, type=real(0, 1), default=0.9, metavar="X")
    weight_decay: float = option("0: none", shapes=True, type=real(0.0), metavar="X")
