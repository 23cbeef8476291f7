"""Measure the time to prepare an image (crop, flip, normalize) with one thread.

    python bench/input.py [--rounds 5] [--seconds 1] [--device cpu] [--json FILE]

These ways take turns:

- PIL with one sample at a time, as in the tutorials
- torchvision's v2 transforms on tensors
- ddptrain's batches, with three sets of options

Prints the microseconds of CPU time per image. With --device cuda, ddptrain's time is GPU time. Goal: PIL takes at least
15 times as long as ddptrain.
"""

import time
from pathlib import Path

import measuring
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from tutorials import NUM_IMAGES, SETTINGS, endless, loader

from ddptrain.config import parse_options
from ddptrain.data.datasets import SOURCES
from ddptrain.data.sampling import batches, epoch_order
from ddptrain.distributed import RankInfo, World
from ddptrain.training_state import build_training_state

BATCH = 128
GOAL = 15.0


class Tensors(Dataset):
    """Images as tensors, through torchvision's v2 transforms."""

    def __init__(self) -> None:
        self.images = torch.randint(0, 256, (NUM_IMAGES, 3, 32, 32), dtype=torch.uint8)
        crop = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]
        middle = [0.5] * 3
        self.transform = v2.Compose([*crop, v2.ToDtype(torch.float32, scale=True), v2.Normalize(middle, middle)])

    def __len__(self) -> int:
        return NUM_IMAGES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.images[index]), index % 10


def ours(device: torch.device, *arguments: str):
    """Yield batches of ddptrain."""
    given = [
        "--data=synthetic",
        f"--synthetic-samples={NUM_IMAGES}",
        "--synthetic-shape=3x32x32",
        "--shift=4",
        "--flip",
    ]
    options = parse_options([*given, f"--batch-size={BATCH}", *arguments], {})
    world = World(rank_info=RankInfo(), device=device, backend="gloo", data_group=None)
    state = build_training_state(options, world, SOURCES["synthetic"].load(options.data, 0), batch_size=BATCH)
    epoch = 0
    while True:
        order = epoch_order(NUM_IMAGES, seed=0, epoch=epoch).to(device)
        for batch in batches(order, BATCH, first=0):
            yield state.batch_builder.batch(batch, epoch=epoch)
        epoch += 1


def timed(ready, count: int, device: torch.device) -> float:
    """Return the seconds that ``count`` batches take."""
    if device.type == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            next(ready)
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1000
    began = time.process_time()
    for _ in range(count):
        next(ready)
    return time.process_time() - began


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cpu, device = torch.device("cpu"), torch.device(args.device)
    ways = {
        "PIL, a sample at a time": (endless(loader(SETTINGS["ResNet-18"])), cpu),
        "torchvision v2 on tensors": (endless(DataLoader(Tensors(), batch_size=BATCH, shuffle=True)), cpu),
        "ddptrain, fp32": (ours(device, "--precision=fp32"), device),
        "ddptrain, bf16": (ours(device, "--precision=bf16"), device),
        "ddptrain, mixup and cutmix": (ours(device, "--precision=fp32", "--mixup=0.2", "--cutmix=1"), device),
    }
    counts = {}
    for name, (ready, where) in ways.items():
        next(ready)
        counts[name] = max(2, round(args.seconds / max(1e-6, timed(ready, 2, where) / 2)))
    costs = {name: [] for name in ways}
    for _, name in measuring.in_turns(list(ways), args.rounds):
        ready, where = ways[name]
        costs[name].append(1e6 * timed(ready, counts[name], where) / counts[name] / BATCH)
    print(f"32x32 images, batch {BATCH}, {args.device}, {measuring.machine()}")
    print(measuring.head("microseconds an image", 32, 8) + f"{'PIL over it':>13}")
    base = costs["PIL, a sample at a time"]
    for name, values in costs.items():
        print(measuring.row(name, values, 32, "8.2f") + f"{measuring.ratio(base, values):13.1f}")
    ratio = measuring.ratio(base, costs["ddptrain, fp32"])
    print(f"goal: PIL at least {GOAL:g} times ddptrain: {'reached' if ratio >= GOAL else 'NOT reached'} ({ratio:.1f})")
    measuring.write_json(args.json, {"machine": measuring.machine(), "device": args.device, "microseconds": costs})


if __name__ == "__main__":
    main()
