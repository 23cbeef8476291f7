"""How a gradient becomes a step."""

from dataclasses import dataclass

from ddptrain.options.field import milestones, option, real

SCHEDULES = ("one-cycle", "cosine", "steps", "constant")


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer and its learning rate."""

    name: str = option(
        "SGD with Nesterov momentum, or AdamW", flag="--optimizer", shapes=True, choices=("sgd", "adamw"), default="sgd"
    )
    lr: float = option("peak learning rate", shapes=True, type=real(0.0), metavar="X")
    scale_lr: bool = option(
        "multiply --lr by the number of ranks, after a warm-up from --lr", shapes=True, default=False
    )
    schedule: str = option(
        "of the learning rate: one-cycle goes up for 30 %% of the steps and down to 0, cosine down to 0, steps down by "
        "--gamma at the --milestones",
        shapes=True,
        choices=SCHEDULES,
        default="one-cycle",
    )
    warmup: float | None = option(
        "epochs in which cosine, steps and constant go up to the peak (default: 0; with --scale-lr 5, or a quarter of "
        "the epochs where that is less)",
        shapes=True,
        type=real(0.0),
        default=None,
        metavar="X",
    )
    milestones: tuple[int, ...] = option(
        "epochs after which the rate is multiplied by --gamma",
        shapes=True,
        type=milestones,
        default=(30, 60, 80),
        metavar="N,N,...",
    )
    gamma: float = option("see --milestones", shapes=True, type=real(0.0), default=0.1, metavar="X")
    momentum: float = option(
        "0 to under 1; 0: plain SGD; AdamW's first beta", shapes=True, type=real(0, 1), default=0.9, metavar="X"
    )
    weight_decay: float = option(
        "of the weights, not of norms and biases; 0: none", shapes=True, type=real(0.0), default=0.0, metavar="X"
    )
    clip: float = option(
        "longest gradient, as a norm; a longer one is shortened; 0: none",
        shapes=True,
        type=real(0.0),
        default=0.0,
        metavar="X",
    )
