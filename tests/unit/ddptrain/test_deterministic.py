"""A step of ``--deterministic`` does the same sums and draws the same numbers wherever its process started."""

import copy
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddptrain.config import RankOptions
from ddptrain.data.base import ImageShape
from ddptrain.data.sampling import seed_step
from ddptrain.distributed import RankInfo, lay_out_buckets, make_world
from ddptrain.models import build_model

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_timeout_also_holds_for_the_collectives_of_the_gradients(group: None) -> None:
    of_gradients: Any = make_world(RankInfo(size=2), "cpu", RankOptions(timeout_s=7)).data_group
    assert of_gradients._get_backend(CPU).options._timeout == timedelta(seconds=7)


Layout = list[list[int]]


def layouts(ddp: DistributedDataParallel, *, accumulate: int = 1) -> list[Layout]:
    """Train three steps; the elements of the parameters in each bucket that was reduced in them."""
    seen: list[Layout] = []

    def record(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        seen[-1].append([parameter.numel() for parameter in bucket.parameters()])
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, record)
    for _ in range(3):
        seen.append([])
        ddp.zero_grad()
        for _ in range(accumulate - 1):
            with ddp.no_sync():
                ddp(torch.rand(4, 1, 8, 8)).sum().backward()
        assert seen[-1] == []
        ddp(torch.rand(4, 1, 8, 8)).sum().backward()
    return seen


@pytest.mark.parametrize("device_ids", [[], [0]], ids=["cpu", "gpu"])
@pytest.mark.parametrize("how", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_buckets_are_laid_out_before_the_first_step_and_never_again(
    group: None, how: dict[str, bool], accumulate: int, device_ids: list[int]
) -> None:
    if how.get("static_graph"):
        accumulate = 1  # check_strategy refuses both
    model = build_model("convnet", ImageShape(channels=1, size_px=8, classes=10))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01, **how)
    ddp.device_ids = device_ids  # with them, as on a GPU, DDP moves the inputs to the device, and needs one
    lay_out_buckets(ddp)
    first, *others = layouts(ddp, accumulate=accumulate)
    assert len(first) > 1
    assert others == [first, first]


def test_laying_out_buckets_leaves_the_model_and_the_generators_alone(group: None) -> None:
    model = build_model("resnet18", ImageShape(channels=3, size_px=16, classes=10))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    lay_out_buckets(DistributedDataParallel(model))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert [parameter.grad for parameter in model.parameters() if parameter.grad is not None] == []
    assert model(torch.rand(2, 3, 16, 16)).shape == (2, 10)  # its own forward pass again


def test_a_steps_random_numbers_depend_on_the_seed_the_step_and_the_rank_alone() -> None:
    def drawn(seed: int, step: int, rank: int) -> list[float]:
        torch.rand(7)
        seed_step(CPU, seed=seed, step=step, rank=rank)
        return torch.rand(2).tolist()

    keys = [(seed, step, rank) for seed in (0, 1) for step in (1, 2) for rank in (0, 1)]
    values = [drawn(*key) for key in keys]
    assert values == [drawn(*key) for key in keys]
    assert len({tuple(value) for value in values}) == len(keys)
