"""Measure the cost of checkpoints, metrics and logging in a training loop (ResNet-18 with momentum).

    python bench/checkpoint.py [--rounds 10] [--device cpu] [--json FILE] [--stall]

"Blocked" is the time for which the loop stops to save a checkpoint. ddptrain writes the file in a background thread.
Two other ways block the loop until the file is written: torch.save of the same state, and torch.save followed by fsync
and rename. Of these two, only the second survives a power failure. The three ways take turns, and each round reverses
their order.

Goals: a checkpoint blocks the loop for at most 25 % of the time of torch.save, and metrics and logging take at most
50 us per step. The exit code is 0 whatever the numbers are. With --stall, prints only the median of the
milliseconds for which ddptrain blocks the loop.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import measuring
import torch
from torch import nn

from ddprank.heartbeat import Heart
from ddpwire.events import EventLog

THREADS = 1
STEPS = 5  # of training, with and without the write of a checkpoint in the background
WATCHED = 3000


def milliseconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - began)


def with_fsync(state: object, path: Path) -> None:
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def checkpoints(folder: Path, rounds: int, device: str, *, stall: bool) -> dict[str, list[float]]:
    """Return the milliseconds of each round. The keys are the names of what was timed. ``stall``: only "ddptrain"."""
    from ddptrain.checkpoint_directory import CheckpointDirectory
    from ddptrain.checkpoint_manager import CheckpointSaver
    from ddptrain.config import CheckpointOptions
    from ddptrain.data.base import ImageShape
    from ddptrain.metrics import Metrics
    from ddptrain.models import build_model

    model = build_model("resnet18", ImageShape(channels=3, size_px=32, classes=10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, fused=True)
    images, labels = torch.randn(8, 3, 32, 32, device=device), torch.arange(8, device=device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        synchronize()

    train(2)
    saver = CheckpointSaver(
        CheckpointDirectory(folder / "ours"),
        CheckpointOptions(keep=2),
        Metrics(),
        events=EventLog(None, node=0),
        warn=print,
    )
    step = 0

    def parts() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def ours() -> None:
        nonlocal step
        step += 1
        saver.save(step, parts(), {}, None)

    ways = {
        "torch.save": lambda: torch.save(parts(), folder / "plain.pt"),
        "torch.save, fsync, rename": lambda: with_fsync(parts(), folder / "safe.pt"),
        "ddptrain": ours,
    }
    if stall:
        ways = {"ddptrain": ours}
    for way in ways.values():
        way()
    saver.wait_for_write(step)
    times: dict[str, list[float]] = {name: [] for name in ways}
    times["until it is on the disk"] = []
    for _, name in measuring.in_turns(list(ways), rounds):
        os.sync()  # so that this does not include what was written before
        times[name].append(milliseconds(ways[name]))
        if name == "ddptrain":
            times["until it is on the disk"].append(times[name][-1] + milliseconds(lambda: saver.wait_for_write(step)))
    if stall:
        return times
    times |= while_written(train, ours, lambda: saver.wait_for_write(step), rounds)
    print(f"checkpoint of {(folder / 'plain.pt').stat().st_size / 1e6:.1f} MB")
    return times


def while_written(
    train: Callable[[int], None], save: Callable[[], None], wait: Callable[[], object], rounds: int
) -> dict[str, list[float]]:
    """Return the milliseconds of some steps, without a checkpoint and while one is written."""
    times: dict[str, list[float]] = {f"{STEPS} steps": [], f"{STEPS} steps while it is written": []}
    for _ in range(rounds):
        times[f"{STEPS} steps"].append(milliseconds(lambda: train(STEPS)))
        save()
        times[f"{STEPS} steps while it is written"].append(milliseconds(lambda: train(STEPS)))
        wait()
    return times


def watching() -> tuple[list[float], float]:
    """Return a list of times and a single time, in microseconds.

    The list has one time for each step: the time that metrics, phases, heartbeat and progress take together. The single
    time is how long the guard takes to check the gradients of a step (a median).
    """
    from ddptrain.callbacks import Callbacks, NonFiniteGuard, ProgressDisplay
    from ddptrain.data.base import ImageShape
    from ddptrain.goodput import Goodput
    from ddptrain.metrics import open_metrics
    from ddptrain.models import build_model
    from ddptrain.step_timing import Phases, Tracer
    from ddptrain.straggler import StragglerDetector

    callbacks = Callbacks(
        poll_stop=lambda: 0,
        heartbeat=Heart(os.environ["DDP_HEARTBEAT_FILE"]),
        metrics=open_metrics(os.environ, first=True),
        goodput=Goodput(time.monotonic()),
        phases=Phases(),
        guard=NonFiniteGuard(torch.device("cpu")),
        ddp=None,
        events=EventLog(None, node=0),
        stragglers=StragglerDetector(0, 1, on_event=print),
        tracer=Tracer(0, Path(), log=print),
        progress=ProgressDisplay(is_shown=True),
        on_gpu=False,
    )
    times = []
    for step in range(1, WATCHED + 1):
        began = time.perf_counter()
        callbacks.phases.begin()
        for phase in ("data", "forward", "backward", "optimizer"):
            callbacks.phases.mark(phase)
        callbacks.on_step_end(step=step, epoch=1, samples=32, lr=0.1)
        callbacks.progress.step(step, WATCHED, "1/1", "1 images/s")
        times.append(1e6 * (time.perf_counter() - began))
    model = build_model("resnet18", ImageShape(channels=3, size_px=32, classes=10))
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    looks = [
        1000 * milliseconds(lambda: callbacks.guard.check(nn.utils.get_total_norm(gradients), optimizer, step=1))
        for _ in range(30)
    ]
    return times, statistics.median(looks)


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stall", action="store_true", help="measure only ddptrain's own way")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as name:
        os.environ |= {"PROMETHEUS_MULTIPROC_DIR": name, "DDP_HEARTBEAT_FILE": f"{name}/heartbeat"}
        machine = measuring.machine()
        times = checkpoints(Path(name), args.rounds, args.device, stall=args.stall)
        if args.stall:
            print(f"{statistics.median(times['ddptrain']):.3f}")
            return
        watched, guard_us = watching()
    print(f"{THREADS} thread, {args.device}, {machine}")
    print(measuring.head("milliseconds", 32, 9))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        print(measuring.row(name, values, 32, "9.1f"))
    ratio = medians["ddptrain"] / medians["torch.save"]
    slowed = medians[f"{STEPS} steps while it is written"] - medians[f"{STEPS} steps"]
    step_us = 1000 * medians[f"{STEPS} steps"] / STEPS
    mean_us = statistics.mean(watched)
    print(f"blocked, ddptrain / torch.save: {100 * ratio:.0f} % (goal: at most 25 %)")
    print(f"steps while it is written are slower by {slowed:.0f} ms in all")
    print(
        f"metrics and logging: {mean_us:.1f} us a step, median {statistics.median(watched):.1f} (goal: at most 50 us)"
    )
    print(
        f"the guard's norm of 11 M gradients: {guard_us / 1000:.1f} ms, {100 * guard_us / step_us:.1f} % of a step of 8"
    )
    result = {"machine": machine, "threads": THREADS, "ratio": ratio, "ms": times}
    result |= {"watch_us": mean_us, "watch_median_us": statistics.median(watched), "guard_us": guard_us}
    measuring.write_json(args.json, result)


if __name__ == "__main__":
    main()
