"""A DDP training into which faults are injected. A step takes --pause seconds.

Every tenth step, and the last step before a stop, saves a checkpoint. Each start continues from the last checkpoint.

For each step, each process of a rank appends a line "TIME STEP" to OUT/steps/RANK.PID. At the end, rank R writes the
sha256 of the weights to OUT/weights/R. The data depend only on the number of the step. Therefore, restarts do not
change the final weights.

With --workers N, batches come from N DataLoader workers. With --do DEED@STEP, the rank given by --rank does DEED each
time that it reaches step STEP. DEED is raise (an exception), segv (a segmentation fault), eat (allocate memory until it
is killed), kill (send itself SIGKILL) or exit-N (exit with code N).
"""

import ddpwire.script as ddp  # isort: skip

import argparse
import ctypes
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH, LAYERS, BATCH, SAVE_EVERY = 32, 4, 4, 10


class Samples(Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def batches(first: int, steps: int, workers: int) -> Iterator[torch.Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    of_step = [[(step * world + rank) * BATCH + i for i in range(BATCH)] for step in range(first, steps)]
    return iter(DataLoader(Samples(), batch_sampler=of_step, num_workers=workers))


def do(deed: str) -> None:
    if deed == "raise":
        raise ValueError("bad label 17 in sample 1234")
    if deed == "segv":
        ctypes.string_at(0)
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    eaten = []
    while deed == "eat":
        eaten.append(os.urandom(1 << 22) * 4)
    sys.exit(int(deed.removeprefix("exit-")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--timeout", type=float, default=20.0, help="of a collective, in s")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--do", default="")
    parser.add_argument("--config", help="for ddprun, which compares it among the nodes")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    rank = dist.get_rank()
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(LAYERS)]
    # find_unused_parameters: else DDP groups the gradients again after its first step, and sums depend on where a
    # process began (docs/script.md). The gradients of 17 kB travel in two buckets.
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved = ddp.checkpoint_dir(args.out / "checkpoints") / "last.pt"
    first = 1
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    dist.barrier()  # nobody saves while another loads
    file = args.out / "steps" / f"{rank}.{os.getpid()}"
    file.parent.mkdir(exist_ok=True)
    (args.out / "weights").mkdir(exist_ok=True)
    deed, _, at = args.do.partition("@")
    with file.open("w", buffering=1) as steps:
        for step, batch in enumerate(batches(first, args.steps + 1, args.workers), first):
            if deed and rank == args.rank and step == int(at):
                do(deed)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            time.sleep(args.pause)
            ddp.progress(step)
            steps.write(f"{time.time()} {step}\n")
            stops = ddp.should_stop()
            if rank == 0 and (stops or step % SAVE_EVERY == 0):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, saved.with_suffix(".part"))
                saved.with_suffix(".part").replace(saved)
            if stops:
                ddp.stop()
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    (args.out / "weights" / str(rank)).write_text(hashlib.sha256(weights).hexdigest())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
