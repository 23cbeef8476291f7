"""The order in which a rank sends its buckets, and the mean of the ranks' states."""

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddptrain import communication
from ddptrain.communication import Communication, mean_state
from ddptrain.distributed import RankInfo, World


@pytest.fixture
def world() -> Iterator[World]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cpu = torch.device("cpu")
    yield World(rank_info=RankInfo(), device=cpu, backend="gloo", data_group=dist.group.WORLD)
    dist.destroy_process_group()


def test_a_bucket_of_powersgd_is_exchanged_before_the_next(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gloo, the all-reduces of two buckets would otherwise begin in an order that differs between ranks."""
    num_exchanged: list[int] = []  # when each bucket begins
    exchanged = []

    def slow_hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        num_exchanged.append(len(exchanged))
        future = torch.futures.Future[Tensor]()
        buffer = bucket.buffer()

        def finish() -> None:
            exchanged.append(buffer)
            future.set_result(buffer)

        threading.Timer(0.02, finish).start()
        return future

    monkeypatch.setattr(communication, "powerSGD_hook", slow_hook)
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), bucket_cap_mb=0.01)
    Communication("powersgd:2", ddp, torch.optim.SGD(ddp.parameters()), world, steps_per_epoch=1)
    ddp(torch.rand(2, 64)).sum().backward()
    assert num_exchanged == [*range(len(num_exchanged))]
    assert len(num_exchanged) > 1


def test_the_mean_of_states() -> None:
    states = [{"memory": [{0: torch.tensor([value])}], "count": torch.tensor(3), "lr": 0.1} for value in (1.0, 4.0)]
    assert mean_state(states) == {"memory": [{0: torch.tensor([2.5])}], "count": torch.tensor(3), "lr": 0.1}
