"""What is done otherwise on a GPU, so that it is never waited for. Needs one."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddptrain.callbacks import NonFinite, NonFiniteGuard
from ddptrain.checkpoint_manager import Snapshot
from ddptrain.config import parse_options
from ddptrain.data.augment import MAX_PART_BYTES, lay_out, num_bytes_laid_out
from ddptrain.distributed import WithAutocast, lay_out_buckets
from ddptrain.optimizer import Muon, build_optimizer
from ddptrain.step_timing import Phases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("kind", ["sgd", "adamw", "muon"])
def test_after_a_nan_no_weight_and_no_state_changes_and_it_becomes_known(kind: str) -> None:
    guard, weight = NonFiniteGuard(torch.device("cuda")), torch.ones(20, 50, device="cuda", requires_grad=True)
    if kind == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    elif kind == "muon":
        bias = torch.ones(10, device="cuda", requires_grad=True)
        optimizer = Muon(torch.optim.Muon([weight]), torch.optim.SGD([bias], lr=0.1, fused=True))
    else:
        optimizer = torch.optim.AdamW([weight], fused=True)
    before: list[torch.Tensor] = []
    for step in range(1, 11):
        optimizer.zero_grad()
        loss = weight.sum() * (float("nan") if step == 4 else 1.0)
        guard.with_nan_gradient(loss).backward()
        if step == 4:
            state = [tensor for tensor in optimizer.state[weight].values() if isinstance(tensor, torch.Tensor)]
            before = [tensor.clone() for tensor in (weight.detach(), *state)]
        guard.check(weight.grad.norm(), optimizer, step=step)
        optimizer.step()
    after = [
        weight.detach(),
        *(tensor for tensor in optimizer.state[weight].values() if isinstance(tensor, torch.Tensor)),
    ]
    assert all(torch.equal(tensor, other) for tensor, other in zip(before, after, strict=True))
    deadline = time.monotonic() + 10
    while not guard.detected:
        assert time.monotonic() < deadline
        guard.check(torch.ones((), device="cuda"), optimizer, step=11)
    assert guard.tripped
    with pytest.raises(NonFinite) as raised:
        guard.raise_if_tripped()
    assert raised.value.step == 4


def test_an_overflow_in_the_first_step_leaves_the_moments_at_0() -> None:
    model = torch.nn.Linear(1000, 1000).cuda()
    options = parse_options(["--optimizer=sgd", "--momentum=0.9"], {}).optimizer
    optimizer, scaler = build_optimizer(model, options), torch.amp.GradScaler()
    for number in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(8, 1000, device="cuda")).sum() * number).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moments = torch.cat([state["momentum_buffer"].flatten() for state in optimizer.state.values()])
        assert bool(moments.isfinite().all())
        assert bool((moments == 0).all()) == (number != 1.0)


def test_after_too_many_overflows_no_step_is_taken_before_it_becomes_known() -> None:
    guard, weight = NonFiniteGuard(torch.device("cuda")), torch.ones(1000, device="cuda", requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1, fused=True), torch.amp.GradScaler()
    for step in range(1, 31):
        optimizer.zero_grad()
        loss = weight.sum() * (float("inf") if 2 < step < 23 else 1.0)
        scaler.scale(guard.with_nan_gradient(loss)).backward()
        scaler.unscale_(optimizer)
        guard.check(weight.grad.norm(), optimizer, step=step, scaled=True)
        scaler.step(optimizer)
        scaler.update()
    assert torch.allclose(weight, torch.full_like(weight, 0.8))
    with pytest.raises(NonFinite) as raised:
        guard.raise_if_tripped()
    assert raised.value.step == 22


def test_buckets_are_laid_out_on_a_gpu() -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(torch.nn.Linear(8, 8).cuda(), device_ids=[0])
        lay_out_buckets(ddp)
        assert ddp(torch.ones(2, 8)).device.type == "cuda"
        assert all(parameter.grad is None for parameter in ddp.parameters())
    finally:
        dist.destroy_process_group()


def test_laying_out_images_holds_no_more_than_is_said() -> None:
    images = torch.randint(0, 256, (20_000, 64, 64, 3), dtype=torch.uint8)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lay_out(images, crop_px=64, shift_px=4, mirrored=True, device=torch.device("cuda"))
    peak = torch.cuda.max_memory_allocated() - before
    needed = num_bytes_laid_out(images, shift_px=4, mirrored=True)
    assert needed <= peak <= needed + 3 * MAX_PART_BYTES


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_parallel_computes_in_the_dtype_that_was_asked_for() -> None:
    seen: list[torch.dtype] = []

    class Seen(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Linear's own name
            output = super().forward(input)
            seen.append(output.dtype)
            return output

    autocast = partial(torch.autocast, "cuda", torch.bfloat16)
    model = torch.nn.DataParallel(WithAutocast(Seen(8, 8).cuda(), autocast))
    with autocast():
        model(torch.ones(4, 8, device="cuda"))
    assert seen == [torch.bfloat16] * torch.cuda.device_count()


def test_the_phases_of_a_step_are_its_time() -> None:
    phases, matrix = Phases(on_gpu=True), torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    for step in range(1, 21):
        phases.begin()
        for phase, number in (("forward", 2), ("backward", 4), ("optimizer", 1)):
            for _ in range(number):
                matrix = (matrix @ matrix).clamp(-1, 1)
            if phase == "backward":
                phases.gradients_ready()
            phases.mark(phase)
        phases.end(step)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    phases.begin()
    assert sum(phases.totals.values()) == pytest.approx(seconds, rel=0.1)
    assert phases.totals["backward"] == pytest.approx(4 * phases.totals["optimizer"], rel=0.3)
    assert phases.totals["comm_exposed"] < 0.1 * phases.totals["backward"]
    assert len(phases.own_s) == 20


def test_a_copy_is_of_the_moment_of_the_call() -> None:
    snapshot, weight = Snapshot(), torch.zeros(50_000_000, device="cuda")
    kept = snapshot.take({"weight": weight})
    weight.add_(1)
    snapshot.wait()
    assert kept["weight"].is_pinned()
    assert float(kept["weight"].sum()) == 0
