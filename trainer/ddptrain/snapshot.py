"""A copy of a training's state in memory that is kept: what the loop waits for when a checkpoint is made."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Snapshot:
    """Kept copies of the tensors of a nested state, on the CPU; pinned where they come from a GPU.

    What ``take`` returned holds until it is called again.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, state: Any) -> Any:
        """The same state, its tensors copied. From a GPU they are there after ``wait``; the GPU waits for nobody."""
        sources: list[Tensor] = []
        copies: list[Tensor] = []
        copy = self._copy(state, (), sources, copies)
        if sources:
            # In the order of the training's own stream: the next step cannot change what is not copied yet.
            torch._foreach_copy_(copies, sources, non_blocking=True)
        if any(source.is_cuda for source in sources):
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return copy

    def wait(self) -> None:
        """Until the copies are whole. From any thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, value: Any, path: tuple[object, ...], sources: list[Tensor], copies: list[Tensor]) -> Any:
        if isinstance(value, Tensor):
            sources.append(value.detach())
            copies.append(self._buffer(path, sources[-1]))
            return copies[-1]
        if isinstance(value, Mapping):
            return {key: self._copy(item, (*path, key), sources, copies) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._copy(item, (*path, index), sources, copies) for index, item in enumerate(value))
        return value

    def _buffer(self, path: tuple[object, ...], source: Tensor) -> Tensor:
        kept = self._kept.get(path)
        if kept is None or (kept.shape, kept.dtype, kept.stride()) != (source.shape, source.dtype, source.stride()):
            kept = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
            self._kept[path] = kept
        return kept
