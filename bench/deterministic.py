"""Measure how much longer a training step takes if gradients are summed in a fixed order.

    python bench/deterministic.py [--ranks 2] [--rounds 15] [--models convnet,resnet18,deep] [--json FILE]

Each step uses DistributedDataParallel (DDP) with gloo on this machine. Four ways take turns in the same processes:

- torch's default: DDP rebuilds its buckets after the first step
- ``ddptrain --deterministic``: the final buckets are built before the first step
- find_unused_parameters=True: DDP keeps the first buckets
- a communication hook that gathers all gradients and adds them in the order of the ranks

The model ``deep`` has 200 parameters. The exit code is 0 whatever the numbers are.
"""

import copy
import json
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import measuring
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from ddptrain.data.base import ImageShape
from ddptrain.distributed import lay_out_buckets
from ddptrain.models import build_model

WAYS = ("as torch does", "laid out before", "find_unused", "hook, rank order")
WARM_UP, STEPS = 3, 5


def deep() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(99)]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))


MODELS = {
    "convnet": (lambda: build_model("convnet", ImageShape(channels=1, size_px=28, classes=10)), (50, 1, 28, 28)),
    "resnet18": (lambda: build_model("resnet18", ImageShape(channels=3, size_px=32, classes=10)), (8, 3, 32, 32)),
    "deep": (deep, (64, 1, 8, 8)),
}


def add_in_rank_order(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore
    own = bucket.buffer()
    gathered = own.new_empty(dist.get_world_size() * own.numel())
    work = dist.all_gather_into_tensor(gathered, own, async_op=True)
    return work.get_future().then(lambda _: gathered.view(dist.get_world_size(), -1).mean(0))


def wrapped(model: nn.Module, way: str) -> DistributedDataParallel:
    unused = way == "find_unused"
    ddp = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True, find_unused_parameters=unused)
    if way == "laid out before":
        lay_out_buckets(ddp)
    if way == "hook, rank order":
        ddp.register_comm_hook(None, add_in_rank_order)
    return ddp


def rank_main(rank: int, size: int, folder: str, models: list[str], rounds: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    times_of = {}
    for name in models:
        make, shape = MODELS[name]
        torch.manual_seed(0)
        model, images = make(), torch.rand(shape)
        ddps = {way: wrapped(model, way) for way in WAYS}
        optimizers = {way: torch.optim.SGD(ddp.parameters(), lr=1e-3, fused=True) for way, ddp in ddps.items()}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for number, way in measuring.in_turns(WAYS, rounds):
            num_warm_up = 0 if number else WARM_UP
            for step in range(num_warm_up + STEPS):
                if step == num_warm_up:
                    dist.barrier()
                    start = time.perf_counter()
                optimizers[way].zero_grad()
                ddps[way](images).square().mean().backward()
                optimizers[way].step()
            times[way].append((time.perf_counter() - start) / STEPS)
        times_of[name] = times
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(times_of))
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = (args.ranks, folder, args.models.split(","), args.rounds)
        start_processes(rank_main, given, nprocs=args.ranks, start_method="spawn")
        times_of = json.loads(Path(folder, "found").read_text())
    print(f"{args.ranks} gloo ranks, {args.rounds} rounds of {STEPS} steps, one thread a rank, {measuring.machine()}")
    print(f"{'ms a step':28}{'median':>9}{'min':>9}{'ratio':>9}   ratio of each round: min to max")
    for name, times in times_of.items():
        for way, values in times.items():
            ratios = [value / plain for value, plain in zip(values, times[WAYS[0]], strict=True)]
            print(
                f"{name + ', ' + way:28}{1000 * statistics.median(values):9.2f}{1000 * min(values):9.2f}"
                f"{statistics.median(ratios):9.3f}   {min(ratios):.3f} to {max(ratios):.3f}"
            )
    measuring.write_json(args.json, {"seconds": times_of})


if __name__ == "__main__":
    main()
