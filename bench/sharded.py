"""Measure how long four gloo ranks take to save and to load a sharded checkpoint, and by how much their memory grows.

    python bench/sharded.py [--ranks 4] [--megabytes 1000]

The ranks train one step of a GPT with fully_shard and Adam, save a checkpoint until it is on the disk, and resume from
it. Prints a JSON object: the seconds until the last rank has done so, and the growth to the peak of memory, in MiB, of
the rank for which it is largest.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import measuring
import torch
from torch.multiprocessing.spawn import start_processes

from ddptrain import sharding  # noqa: F401 -- imported before the fork, so that no rank imports it
from ddptrain.callbacks import NonFiniteGuard
from ddptrain.checkpoint_directory import CheckpointDirectory
from ddptrain.checkpoint_manager import CheckpointManager
from ddptrain.config import parse_options
from ddptrain.data.sampling import shard_of
from ddptrain.data.text import load_text
from ddptrain.distributed import RankInfo, gather, join_ranks, make_world, set_up_torch
from ddptrain.goodput import Goodput
from ddptrain.metrics import Metrics
from ddptrain.step_timing import Phases
from ddptrain.train_loop import train_step
from ddptrain.training_state import build_training_state
from ddpwire.events import EventLog

WIDTH = 1024
LAYER_BYTES = 12 * WIDTH**2 * 3 * 4  # the parameters of a layer of GPT, each with Adam's two moments, in float32


def measure(rank_info: RankInfo, action: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that all ranks take for an action, and by how many MiB the memory of one of them grows."""
    gather(rank_info, None)
    measuring.reset_peak()
    before, began = measuring.memory_mib("VmRSS"), time.monotonic()
    action()
    grown = gather(rank_info, measuring.memory_mib("VmHWM") - before)
    return time.monotonic() - began, max(grown)


def rank_main(rank: int, ranks: int, layers: int, folder: Path) -> None:
    """Run one rank."""
    arguments = ["--data", "text", "--data-dir", str(folder / "corpus.txt"), "--strategy", "fsdp", "--optimizer"]
    arguments += ["adamw", "--layers", str(layers), "--width", str(WIDTH), "--heads", "16", "--context", "16"]
    arguments += ["--batch-size", str(ranks), "--device", "cpu", "--checkpoint-dir", str(folder / "checkpoints")]
    options = parse_options([*arguments, "--init-method", f"file://{folder}/meet"], os.environ)
    rank_info = RankInfo(rank=rank, size=ranks, local_rank=rank, local_world_size=ranks)
    set_up_torch(rank_info, os.environ, deterministic=False)
    join_ranks(rank_info, options.ranks)
    world = make_world(rank_info, "cpu", options.ranks)
    state = build_training_state(options, world, load_text(options.data, 0), batch_size=ranks)
    guard = NonFiniteGuard(world.device)
    shard = shard_of(torch.arange(ranks), rank=rank, shares=(1,) * ranks)
    train_step(state, shard, step=1, epoch=0, lr=0.01, phases=Phases(), guard=guard)
    directory = CheckpointDirectory(options.checkpoints.folder) if rank_info.is_first else None
    new = partial(
        CheckpointManager, state, directory, Metrics(), Goodput(0.0), EventLog(None, node=0), on_wait=lambda _: None
    )
    save_s, save_mib = measure(rank_info, partial(new().save_last, 1, None))
    load_s, load_mib = measure(rank_info, new().resume)
    if rank_info.is_first:
        result = {"save": save_s, "load": load_s, "save-memory": save_mib, "load-memory": load_mib}
        print(json.dumps(result), flush=True)
    gather(rank_info, None)


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "corpus.txt").write_bytes(bytes(range(32, 127)) * 1000)
        layers = max(1, round(args.megabytes * 1_000_000 / LAYER_BYTES))
        start_processes(rank_main, (args.ranks, layers, folder), nprocs=args.ranks, start_method="fork")


if __name__ == "__main__":
    main()
