"""Compare the time of an epoch in a notebook: ddpctl.notebook against mp.spawn with DataLoader workers.

    python bench/notebook.py [--rounds 2] [--epochs 3] [--images 8192] [--batch 128] [--plot FILE.svg] [--json FILE]

Both ways train the same small model on two gloo ranks with one thread each. Both use the same number of images of
CIFAR's shape, and crop and mirror them. mp.spawn starts ranks that train as in the tutorials, with two DataLoader
workers per rank, which are started in each epoch. ddpctl.notebook.launch starts ranks that use ddptrain's step and
input. The ways take turns, and each round reverses their order. The first epoch of each turn does not count.

ddptrain.step_timing measures the time in both cases. "Not computing" is the time outside forward, backward and the
optimizer: the start of workers, the input, and waiting for the other rank.
"""

import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import measuring

ROOT = Path(__file__).parent.parent
COMPUTE = ("forward", "backward", "optimizer")
PARTS = {"workers start": ("start",), "input": ("data", "h2d"), "waiting for the other rank": ("comm_exposed",)}
PARTS |= {"other": ("other",), "computing": COMPUTE}


def model_of(shape):
    from ddptrain.models import build_model

    return build_model("convnet", shape)


def tutorial_rank(rank, port, epochs, images, batch, file):
    """Train as the tutorials do. mp.spawn calls this on each rank."""
    import torch
    import torch.distributed as dist
    import tutorials
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler
    from tutorials import Pictures, Setting, optimizer

    from ddptrain.data.base import ImageShape
    from ddptrain.step_timing import measure_phases

    torch.set_num_threads(1)
    tutorials.NUM_IMAGES = images
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    shape = ImageShape(channels=3, size_px=32, classes=10)
    data = Pictures(Setting(model="convnet", shape=shape, batch_size=batch, augmented=True))
    sampler = DistributedSampler(range(images), 2, rank)
    loader = DataLoader(data, batch_size=batch, sampler=sampler, num_workers=2, drop_last=True)
    model = DistributedDataParallel(model_of(shape))
    optim, criterion = optimizer(model), nn.CrossEntropyLoss()
    phases, measured = measure_phases(torch.device("cpu"), model.parameters(), alone=False), []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        before, began = dict(phases.totals), time.perf_counter()
        batches = iter(loader)
        first = next(batches)
        start = time.perf_counter() - began
        step = 0
        while first is not None:
            step += 1
            phases.begin()
            inputs, labels = first
            phases.mark("data")
            loss = criterion(model(inputs), labels)
            phases.mark("forward")
            optim.zero_grad()
            loss.backward()
            phases.mark("backward")
            optim.step()
            loss.item()
            phases.mark("optimizer")
            first = next(batches, None)
            phases.mark("data")
            phases.end(step)
        spent = {name: phases.totals[name] - before[name] for name in before}
        measured.append({"epoch": time.perf_counter() - began, "start": start, **spent})
    if rank == 0:
        Path(file).write_text(json.dumps(measured))
    dist.barrier()
    del batches, loader, model, optim, loss
    gc.collect()
    dist.destroy_process_group()


def tutorial(epochs, images, batch):
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "told.json"
        mp.spawn(tutorial_rank, args=(measuring.free_port(), epochs, images, batch, str(file)), nprocs=2)
        return json.loads(file.read_text())


def ours_rank(epochs, images, batch):
    """Train with ddptrain's step and input. ddpctl.notebook.launch calls this on each rank."""
    import torch
    import torch.distributed as dist

    from ddptrain.callbacks import NonFiniteGuard
    from ddptrain.config import parse_options
    from ddptrain.data.datasets import SOURCES
    from ddptrain.data.sampling import batches, epoch_order, shard_of
    from ddptrain.distributed import RankInfo, World
    from ddptrain.step_timing import measure_phases
    from ddptrain.train_loop import train_step
    from ddptrain.training_state import build_training_state

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    arguments = ["--data=synthetic", f"--synthetic-samples={images}", "--synthetic-shape=3x32x32", "--model=convnet"]
    arguments += [
        f"--batch-size={2 * batch}",
        "--lr=0.01",
        "--schedule=constant",
        "--shift=4",
        "--flip",
        "--precision=fp32",
    ]
    options = parse_options(arguments, {})
    rank_info = RankInfo(rank=rank, size=2, local_rank=rank, local_world_size=2)
    world = World(rank_info=rank_info, device=torch.device("cpu"), backend="gloo", data_group=dist.group.WORLD)
    data = SOURCES["synthetic"].load(options.data, 0)
    state = build_training_state(options, world, data, batch_size=options.training.batch_size)
    phases, guard, measured, step = (
        measure_phases(world.device, state.model.parameters(), alone=False),
        NonFiniteGuard(world.device),
        [],
        0,
    )
    for epoch in range(epochs):
        before, began = dict(phases.totals), time.perf_counter()
        order = epoch_order(len(state.data.train), seed=0, epoch=epoch)
        for indices in batches(order, state.batch_size, first=0):
            phases.begin()
            shard = shard_of(indices, rank=rank, shares=(1, 1))
            step += 1
            train_step(state, shard, step=step, epoch=epoch, lr=0.01, phases=phases, guard=guard)
            phases.end(step)
        spent = {name: phases.totals[name] - before[name] for name in before}
        measured.append({"epoch": time.perf_counter() - began, "start": 0.0, **spent})
    return measured


def ours(epochs, images, batch):
    from ddpctl.notebook import launch

    with contextlib.redirect_stdout(sys.stderr):
        return launch(ours_rank, gpus=2, args=(epochs, images, batch), device="cpu")


WAYS = {"tutorial": tutorial, "ours": ours}


def summary(epochs):
    """Return the seconds of each part of an epoch: the median of all epochs that count."""
    rows = {part: [sum(epoch.get(name, 0.0) for name in names) for epoch in epochs] for part, names in PARTS.items()}
    medians = {part: statistics.median(values) for part, values in rows.items()}
    medians["epoch"] = statistics.median(epoch["epoch"] for epoch in epochs)
    computing = [sum(epoch[name] for name in COMPUTE) for epoch in epochs]
    idle = [epoch["epoch"] - spent for epoch, spent in zip(epochs, computing, strict=True)]
    medians["not computing"] = statistics.median(idle)
    return medians


def table(summaries):
    rows = ["workers start", "input", "waiting for the other rank", "not computing", "computing", "epoch"]
    lines = [f"{'seconds an epoch':28}{'tutorial':>10}{'ours':>10}{'ours / tutorial':>18}"]
    for row in rows:
        a, b = summaries["tutorial"][row], summaries["ours"][row]
        lines.append(f"{row:28}{a:10.3f}{b:10.3f}{(f'{b / a:.3f}' if a else '-'):>18}")
    idle = summaries["ours"]["not computing"] / summaries["tutorial"]["not computing"]
    quicker = summaries["tutorial"]["epoch"] / summaries["ours"]["epoch"]
    lines.append(
        f"not computing {idle:.3f} x the tutorial's (asked: at most 0.1); the epoch {quicker:.1f} x faster (asked: 4)"
    )
    return "\n".join(lines)


def plot(summaries, file):
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "ddpctl"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 1.9))
    ends = dict.fromkeys(WAYS, 0.0)
    for part in PARTS:
        widths = [summaries[way][part] for way in WAYS]
        axes.barh(list(WAYS), widths, left=list(ends.values()), label=part)
        ends = {way: ends[way] + width for way, width in zip(WAYS, widths, strict=True)}
    axes.invert_yaxis()
    axes.set_xlabel("seconds an epoch")
    axes.legend(fontsize="x-small", ncols=3, loc="lower right")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main():
    parser = measuring.options(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=128, help="a rank's")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("DDPCTL_STATE_DIR", tempfile.mkdtemp(prefix="ddpctl-bench-"))
    measured = {way: [] for way in WAYS}
    for number, way in measuring.in_turns(list(WAYS), args.rounds):
        epochs = WAYS[way](args.epochs + 1, args.images, args.batch)[1:]
        measured[way] += epochs
        seconds = " ".join(format(epoch["epoch"], ".2f") for epoch in epochs)
        print(f"round {number + 1}  {way:10} {seconds} s", file=sys.stderr)
    summaries = {way: summary(epochs) for way, epochs in measured.items()}
    print(
        f"{args.images} images of 32x32, batch {args.batch} a rank, two ranks, {measuring.machine()}, "
        f"n = {len(measured['ours'])}"
    )
    print(table(summaries))
    measuring.write_json(args.json, {"epochs": measured, "summary": summaries})
    if args.plot:
        plot(summaries, args.plot)


if __name__ == "__main__":
    main()
