"""What it runs on, and in which arithmetic."""

from dataclasses import dataclass

from ddptrain.options.field import option

DEVICES = ("auto", "cuda", "cpu")
COMPILE = ("off", "default", "reduce-overhead", "max-autotune")


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The device and its arithmetic."""

    device: str = option("%(choices)s", choices=DEVICES, default="auto")
    precision: str = option(
        "of the matrix products; auto: bf16 where the hardware has it, else fp16 on a GPU and fp32 on a CPU; fp32 with "
        "--deterministic; fp64 is for comparing runs",
        choices=("auto", "fp32", "bf16", "fp16", "fp64"),
        default="auto",
    )
    channels_last: bool = option("keep images and features with their channels together", default=True)
    compile: str = option(
        "torch.compile, which takes a while before the first step; reduce-overhead: with CUDA graphs",
        choices=COMPILE,
        default="off",
    )
    deterministic: bool = option(
        "one thread a rank and fixed algorithms: the same seed gives the same weights, bit for bit", default=False
    )
