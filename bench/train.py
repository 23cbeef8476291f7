"""Compare the images per CPU-second of the tutorials' loops, the frameworks and ddptrain, with the same model and
images.

    python bench/train.py [--ranks 1] [--rounds 3] [--seconds 3] [--models A,B] [--ways A,B] [--json FILE]

A process with one thread trains a model in all these ways. With --ranks 2, there are two such processes, which are gloo
ranks. The ways take turns, and each round reverses their order. On a GPU, CUDA events measure the time, and the unit is
images per second. The exit code is 0 whatever the numbers are.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import measuring
from measuring import start_python

WAYS = ("tutorial", "fabric", "accelerate", "lightning", "fabric bf16", "accelerate bf16", "lightning bf16", "ddptrain")
TIMEOUT_S = 3600.0
GOALS = {  # images per CPU-second over the tutorial's, and over the best framework's in float32
    1: {"ConvNet": (2.9, 1.9), "ImageClassifier": (2.2, 1.7), "ResNet-18": (1.4, 1.1)},
    2: {"ConvNet": (2.4, 1.9), "ImageClassifier": (2.0, 1.7), "ResNet-18": (1.2, 1.1)},
}


def ours(setting):
    """Return a function that runs ddptrain's training steps, and the name of their precision."""
    from tutorials import NUM_IMAGES

    from ddptrain.callbacks import NonFiniteGuard
    from ddptrain.config import parse_options
    from ddptrain.data.datasets import SOURCES
    from ddptrain.data.sampling import batches, epoch_order, shard_of
    from ddptrain.distributed import RankInfo, World
    from ddptrain.step_timing import measure_phases
    from ddptrain.train_loop import train_step
    from ddptrain.training_state import build_training_state

    shape = setting.shape
    arguments = ["--data=synthetic", f"--synthetic-samples={NUM_IMAGES}", f"--model={setting.model}"]
    arguments += [f"--synthetic-shape={shape.channels}x{shape.size_px}x{shape.size_px}", f"--stem={setting.stem}"]
    arguments += [f"--batch-size={setting.batch_size * setting.size}", "--lr=0.01", "--schedule=constant"]
    options = parse_options([*arguments, *(["--shift=4", "--flip"] if setting.augmented else [])], {})
    import torch

    device = torch.device(setting.device)
    rank_info = RankInfo(rank=setting.rank, size=setting.size, local_rank=setting.rank, local_world_size=setting.size)
    group = torch.distributed.group.WORLD if setting.size > 1 else None
    world = World(rank_info=rank_info, device=device, backend="gloo", data_group=group)
    data = SOURCES["synthetic"].load(options.data, 0)
    state = build_training_state(options, world, data, batch_size=options.training.batch_size)

    def stream():
        epoch = 0
        while True:
            order = epoch_order(len(state.data.train), seed=0, epoch=epoch).to(device)
            for batch in batches(order, state.batch_size, first=0):
                if len(batch) == state.batch_size:
                    yield epoch, shard_of(batch, rank=rank_info.rank, shares=(1,) * rank_info.size)
            epoch += 1

    shares, done = stream(), [0]
    guard, phases = NonFiniteGuard(device), measure_phases(device, state.model.parameters(), alone=setting.size == 1)

    def steps(count: int) -> None:
        for _ in range(count):
            epoch, shard = next(shares)
            phases.begin()
            train_step(state, shard, step=done[0] + 1, epoch=epoch, lr=0.01, phases=phases, guard=guard)
            phases.end(done[0] + 1)
            done[0] += 1

    return steps, state.precision.name


def way(name, setting):
    import frameworks
    import tutorials

    if name == "tutorial":
        return tutorials.tutorial(setting)
    if name == "ddptrain":
        return ours(setting)[0]
    plain = name.removesuffix(" bf16")
    return getattr(frameworks, plain)(setting, bf16=name.endswith(" bf16"))


def timed(steps, count, device):
    """Return the seconds for ``count`` steps: CPU time of all threads or, on a GPU, the time between CUDA events."""
    import torch

    if device == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        steps(count)
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1000
    began = time.process_time()
    steps(count)
    paused = getattr(steps, "paused", None)
    return time.process_time() - began - (paused.overhead_s if paused else 0.0)


def worker(args) -> None:
    """Run one rank. It trains one model in all ways, which take turns."""
    import dataclasses

    import torch
    import torch.distributed as dist
    from tutorials import SETTINGS

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")
    setting = dataclasses.replace(SETTINGS[args.worker], rank=rank, size=size, device=args.device)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ways = {name: way(name, setting) for name in args.ways}
        rates = {name: [] for name in ways}
        took = {}
        for name, steps in ways.items():
            steps(1)
            seconds = torch.tensor(timed(steps, 2, args.device) / 2)
            if size > 1:
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            took[name] = float(seconds)
        for _, name in measuring.in_turns(list(ways), args.rounds):
            count = max(2, round(args.seconds / took[name]))
            seconds = torch.tensor(timed(ways[name], count, args.device))
            if size > 1:
                dist.all_reduce(seconds)
            rates[name].append(count * setting.batch_size * size / float(seconds))
    if rank == 0:
        Path(args.result).write_text(json.dumps(rates))
        os.environ.pop("RANK")
    if size > 1:
        dist.barrier()
    os._exit(0)


def measure(model: str, args) -> dict[str, list[float]]:
    """Start new ranks that train one model in each way. Return the rates of each way."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "rates.json")
        arguments = [__file__, "--worker", model, "--result", str(result), "--device", args.device]
        arguments += ["--rounds", str(args.rounds), "--seconds", str(args.seconds), "--ways", ",".join(args.ways)]
        port = measuring.free_port()
        ranks = []
        for rank in range(args.ranks):
            environ = {"RANK": rank, "WORLD_SIZE": args.ranks, "OMP_NUM_THREADS": 1}
            if args.ranks > 1:
                environ |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": args.ranks}
                environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environ = {name: str(value) for name, value in environ.items()}
            ranks.append(start_python(arguments, env=os.environ | environ))
        try:
            for process in ranks:
                if process.wait(timeout=TIMEOUT_S):
                    raise SystemExit(f"train.py: a rank of {model} exited with {process.returncode}")
        finally:
            for process in ranks:
                process.kill()
        return json.loads(result.read_text())


def table(rates_of: dict[str, dict[str, list[float]]], ranks: int) -> list[str]:
    """Return the lines of the table. A ratio is a way's rate, divided by the tutorial's rate in the same round."""
    lines = [f"{'':28}{'images/s':>10}{'over the tutorial':>20}{'min':>7}{'max':>7}{'n':>4}"]
    for model, rates in rates_of.items():
        lines.append(model)
        base = rates["tutorial"]
        for name, values in rates.items():
            ratios = [mine / theirs for mine, theirs in zip(values, base, strict=True)]
            rate, middle = statistics.median(values), statistics.median(ratios)
            spread = f"{min(ratios):7.2f}{max(ratios):7.2f}{len(ratios):4}"
            lines.append(f"  {name:26}{rate:10.0f}{middle:20.2f}{spread}")
        lines += goals(model, rates, ranks)
    return lines


def goals(model: str, rates: dict[str, list[float]], ranks: int) -> list[str]:
    """Return lines that say whether the goals for a model are reached."""
    if model not in GOALS.get(ranks, {}) or "ddptrain" not in rates:
        return []
    lines = []
    plain, best = GOALS[ranks][model]
    ratio = measuring.ratio(rates["ddptrain"], rates["tutorial"])
    lines.append(f"  goal: {plain} x the tutorial: {'reached' if ratio >= plain else 'NOT reached'} ({ratio:.2f})")
    for suffix, precision in (("", "in float32"), (" bf16", "in their bf16")):
        names = [
            name
            for name in rates
            if name in {f"{framework}{suffix}" for framework in ("fabric", "accelerate", "lightning")}
        ]
        if names:
            top = max(names, key=lambda name: statistics.median(rates[name]))
            over = measuring.ratio(rates["ddptrain"], rates[top])
            goal = f", goal {best}: {'reached' if over >= best else 'NOT reached'}" if not suffix else ""
            lines.append(f"  over the best framework {precision} ({top}): {over:.2f}{goal}")
    return lines


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each way in each round, about")
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=["ConvNet", "ImageClassifier", "ResNet-18"]
    )
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
    from ddptrain.compat import has_cpu_bf16

    rates_of = {model: measure(model, args) for model in args.models}
    has = "with" if has_cpu_bf16() else "WITHOUT"
    processes = "one process" if args.ranks == 1 else f"{args.ranks} gloo ranks"
    print(f"{processes} of one thread on {args.device}, {measuring.machine()}, {has} bf16 instructions")
    print("\n".join(table(rates_of, args.ranks)))
    setting = {"machine": measuring.machine(), "bf16": has_cpu_bf16(), "ranks": args.ranks, "device": args.device}
    measuring.write_json(args.json, {**setting, "rates": rates_of})


if __name__ == "__main__":
    main()
