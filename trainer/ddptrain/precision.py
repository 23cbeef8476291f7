"""The arithmetic of a training: chosen by the hardware, or as asked."""

import contextlib
from dataclasses import dataclass

import torch

from ddptrain.errors import TrainError
from ddptrain.options.machine import MachineOptions
from ddpwire.exits import Exit

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """``weights``: the type that parameters are kept in; ``compute``: that of the matrix products."""

    name: str
    compute: torch.dtype
    weights: torch.dtype
    scaler: torch.amp.GradScaler | None  # keeps fp16's gradients from becoming 0

    @property
    def mixed(self) -> bool:
        """Whether autocast is needed."""
        return self.compute != self.weights

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """What a forward pass runs in."""
        return torch.autocast(device.type, self.compute) if self.mixed else contextlib.nullcontext()


def choose_precision(options: MachineOptions, device: torch.device) -> Precision:
    """Raises TrainError for one that the device has not."""
    name = options.precision
    if name == "auto":
        name = "fp32" if options.deterministic else fastest(device)
    if name == "fp16" and device.type == "cpu":
        raise TrainError(Exit.CONFIG, "--precision fp16 needs a GPU: give bf16, fp32 or auto")
    compute = DTYPES[name]
    weights = torch.float64 if name == "fp64" else torch.float32
    scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
    return Precision(name=name, compute=compute, weights=weights, scaler=scaler)


def fastest(device: torch.device) -> str:
    """bf16 where the hardware itself has it: on other CPUs it is slower than fp32, and a T4 emulates it."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if has_cpu_bf16() else "fp32"


def has_cpu_bf16() -> bool:
    """AVX-512 bf16 or AMX. Private names: where a torch has them not, the answer is no."""
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        ask = getattr(torch.cpu, name, None)
        if ask is not None and ask():
            return True
    return False
