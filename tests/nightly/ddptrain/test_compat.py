"""Without the private interfaces of torch: the plain fallbacks give the same."""

import sys

import pytest
import torch
from torch import Tensor, nn

from ddptrain import compat


@pytest.fixture(params=["private", "fallback"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With torch's private names, and without."""
    if request.param == "fallback":
        for owner, name in (
            (torch, "_foreach_copy_"),
            (torch.cpu, "_is_avx512_bf16_supported"),
            (torch.cpu, "_is_amx_tile_supported"),
        ):
            monkeypatch.delattr(owner, name)
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", None)
    return str(request.param)


def tensors(*values: float) -> list[Tensor]:
    return [torch.full((3,), value) for value in values]


def test_copies(either: str) -> None:
    copies = tensors(0.0, 0.0)
    compat.copy_all(copies, tensors(5.0, 6.0))
    assert torch.equal(torch.stack(copies), torch.stack(tensors(5.0, 6.0)))


def test_what_is_not_known_is_nothing(either: str) -> None:
    if either == "fallback":
        assert (compat.has_cpu_bf16(), compat.flight_recorder_dump()) == (False, None)
        assert compat.ddp_overlap_ns(nn.Linear(1, 1)) == 0


def test_tensors_with_the_same_memory_have_the_same_number() -> None:
    first, other = tensors(1.0, 1.0)
    assert compat.storage_id(first) == compat.storage_id(first[1:]) != compat.storage_id(other)
