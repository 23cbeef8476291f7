"""A rank of bench/gpu_checks.py. It does not use ddptrain, so torchrun can start it as well.

gpu_rank.py losses --model mlp|resnet18 [--steps 10] [--backend gloo] --out FILE
gpu_rank.py ENDING --out FILE      write FILE, and then end or hang as ENDING says
"""

import argparse
import json
import os
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HUGE = 1 << 62  # cycles of a kernel that does not end
HELD_BYTES = 1 << 30


def take_device(name: str) -> torch.device:
    """Return this rank's device. Ranks share a GPU if there are fewer GPUs than ranks."""
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join(device: torch.device, backend: str | None = None) -> None:
    dist.init_process_group(backend or ("nccl" if device.type == "cuda" else "gloo"))


def block(device: torch.device) -> None:
    """Start a kernel that does not end. A CPU has none, so this rank sleeps."""
    if device.type == "cuda":
        torch.cuda._sleep(HUGE)
    else:
        time.sleep(HUGE >> 40)


def write(path: Path, value: object) -> None:
    """Write a file of this rank, which is complete when it has its name."""
    path = path.with_name(f"{path.name}.{os.environ.get('RANK', '0')}")
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value))
    part.rename(path)


def losses(args: argparse.Namespace, device: torch.device) -> None:
    """Train, and write the losses, the backends, their flight recorders' entries, and the memory."""
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    began = time.monotonic()
    join(device, args.backend)
    torch.manual_seed(0)
    if args.model == "mlp":
        model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 256), nn.ReLU(), nn.Linear(256, 10))
    else:
        from torchvision.models import resnet18

        model = resnet18(num_classes=10)
    ddp = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    values = []
    for _ in range(args.steps):
        images = torch.randn(16, 3, 32, 32, generator=generator).to(device)
        labels = torch.randint(0, 10, (16,), generator=generator).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(images), labels)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    from ddprun.system import compat

    recorders = json.loads(compat.flight_recorder())
    result = {
        "losses": values,
        "seconds": time.monotonic() - began,
        "backends": [type(dist.group.WORLD._get_backend(device)).__name__],
        "unrecorded": recorders.pop("unrecorded"),
        "recorded": {name: len(recorder.get("entries", ())) for name, recorder in recorders.items()},
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "gpu_mb": torch.cuda.max_memory_allocated() >> 20 if device.type == "cuda" else 0,
    }
    write(args.out, result)
    dist.destroy_process_group()
    os._exit(0)  # a DDP model may abort with gloo


def out_of_memory(device: torch.device) -> None:
    if device.type == "cpu":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is the CPU form's.")
    kept = []
    while True:
        kept.append(torch.empty(1 << 30, dtype=torch.uint8, device=device))


def device_assert(device: torch.device) -> None:
    table = torch.zeros(4, 4, device=device)
    table[torch.tensor([4], device=device)].sum().item()


def killed_in_kernel(device: torch.device) -> None:
    block(device)
    if device.type == "cuda":
        torch.cuda.synchronize()


def hang_in_kernel(device: torch.device) -> None:
    """Block rank 1 in a kernel. The others wait for it in a collective of gloo."""
    join(device, "gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        killed_in_kernel(device)
    dist.all_reduce(torch.ones(4))


def hang_in_collective(device: torch.device) -> None:
    """Wait in a collective. NCCL's does not begin, because a kernel before it does not end."""
    join(device)
    dist.all_reduce(torch.ones(1, device=device))
    if device.type == "cuda" or dist.get_rank() == 1:
        block(device)
    value = torch.ones(4, device=device)
    dist.all_reduce(value)
    value.sum().item()


def held(device: torch.device) -> None:
    """Hold some memory and keep the device busy, so that metrics have values."""
    memory = torch.zeros(HELD_BYTES if device.type == "cuda" else 1, dtype=torch.uint8, device=device)
    matrix = torch.randn(2048 if device.type == "cuda" else 64, device=device).outer(torch.ones(64, device=device))
    while memory.numel():
        (matrix @ matrix.T).sum().item()


ENDINGS = {
    function.__name__: function
    for function in (out_of_memory, device_assert, killed_in_kernel, hang_in_kernel, hang_in_collective, held)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("losses", *ENDINGS))
    parser.add_argument("--model", choices=("mlp", "resnet18"), default="mlp")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--backend")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = take_device(args.device)
    if args.mode == "losses":
        losses(args, device)
    if device.type == "cuda":
        torch.zeros(1, device=device)
    write(args.out, os.getpid())
    ENDINGS[args.mode](device)


if __name__ == "__main__":
    main()
