"""What it runs on, and how the ranks meet."""

from dataclasses import dataclass

from ddptrain.options.field import option, whole

DEVICES = ("auto", "cuda", "cpu")


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The device and the world."""

    device: str = option("%(choices)s", choices=DEVICES, default="auto")
    timeout_s: int = option(
        "longest wait for the other ranks: to come, to download data, to answer",
        flag="--timeout",
        type=whole(1),
        default=300,
        metavar="SECONDS",
    )
    deterministic: bool = option(
        "one thread a rank and fixed algorithms: the same seed gives the same weights, bit for bit", default=False
    )
