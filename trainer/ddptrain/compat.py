"""All private interfaces of torch that ddptrain uses. Each one has a check and a simple fallback."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def copy_all(copies: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each tensor without waiting for the GPU, in one call if possible."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(copies, sources, non_blocking=True)
        return
    for copy, source in zip(copies, sources, strict=True):
        copy.copy_(source, non_blocking=True)


def has_cpu_bf16() -> bool:
    """Return whether the CPU has AVX-512 bf16 or AMX. The result is False if torch cannot detect them."""
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        is_supported = getattr(torch.cpu, name, None)
        if is_supported is not None and is_supported():
            return True
    return False


def flight_recorder_dump() -> Callable[[], Any] | None:
    """Return the function that dumps gloo's last collectives as JSON, or None if this torch has no such function."""
    try:
        from torch._C._distributed_c10d import _dump_fr_trace_json
    except ImportError:
        return None
    dump: Callable[[], Any] = _dump_fr_trace_json
    return dump


def sharded_type() -> type | tuple[type, ...]:
    """Return the type of sharded tensors, or () if torch.distributed.tensor was not imported.

    This function does not import the module, because the import takes 1 s.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else module.DTensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the complete tensor. Gather a sharded tensor from the ranks, or sum a partial tensor over the ranks."""
    sharded: Any = tensor
    return sharded.full_tensor() if isinstance(tensor, sharded_type()) else tensor


def storage_id(tensor: Tensor) -> int:
    """Return a number that identifies the memory of a tensor. Tensors on the meta device have such a number, too."""
    storage = tensor.untyped_storage()
    return int(getattr(storage, "_cdata", None) or storage.data_ptr())


def ddp_overlap_ns(ddp: nn.Module | None) -> int:
    """Return how long DDP communicates during the backward pass of a step, in ns, or 0 without DDP or if it is unknown.

    The time is the mean of the steps in which DDP measures it, which is every hundredth step.
    """
    data: dict[str, Any] = getattr(ddp, "_get_ddp_logging_data", dict)()
    return int(data.get("avg_backward_compute_comm_overlap_time", 0))
