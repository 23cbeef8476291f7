"""Check one thing that needs a GPU. bench/gpu.py runs these checks as its steps.

    python bench/gpu_checks.py CHECK --device cuda|cpu [--data-dir DIR] [--json FILE]

With ``--device cpu``, a check runs its CPU form: the same commands, without what only a GPU has. Prints a line for each
fact. The exit code is 1 if a fact is not as expected.
"""

import contextlib
import gc
import gzip
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measuring
import psutil
from explain import explained
from kills import Run

from ddpwire.events import EVENTS_FILE
from ddpwire.run_files import METRICS_URL, Outcome, read_node, read_outcome

ROOT = Path(__file__).parent.parent
RANK = str(Path(__file__).with_name("gpu_rank.py"))
START_S, END_S = 60.0, 30.0
FREE_MB = 64  # GPU memory that may differ before and after a run
SAMPLES = "--synthetic-samples=512"
MODELS = ("simple", "convnet", "imageclassifier", "resnet18", "torchvision:mobilenet_v3_small", "torchvision:resnet50")
CPU_RECIPES = (
    *(
        "cifar10-94",
        "cifar10-imageclassifier",
        "cifar10-resnet18-pretrained",
        "digits-digitsnet",
        "mnist-convnet",
        "text-gpt",
    ),
    "folder-resnet18-pretrained",
)
FORECAST = 1.35  # what is measured may be this many times the forecast
PRECISIONS = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "bf16", "fp16")}
NEAR = 0.005  # what the accuracy of one run may be below the published mean


class Facts:
    """What a check has found. Each fact is printed."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.wrong: list[str] = []

    def add(self, name: str, value: object, *, right: object = True) -> None:
        """Add a fact. ``right`` is false if the value is not as expected."""
        self.values[name] = value
        self.wrong += [] if right else [name]
        print(f"{'      ' if right else 'WRONG '}{name}: {value}", flush=True)


def nvml() -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def gpu_mb(device: str) -> int:
    """Return the memory in use on the first GPU, of all processes."""
    if device == "cpu":
        return 0
    library = nvml()
    return int(library.nvmlDeviceGetMemoryInfo(library.nvmlDeviceGetHandleByIndex(0)).used) >> 20


@contextlib.contextmanager
def job(mode: str, device: str, ranks: int, *options: str) -> Iterator[Run]:
    """Start ddprun with ranks of gpu_rank.py, and end it."""
    with tempfile.TemporaryDirectory() as folder:
        script = ("--max-restarts=0", "--grace=2", RANK, mode, f"--device={device}", f"--out={folder}/rank")
        run = Run(Path(folder), ranks, *options, script=script)
        try:
            yield run
        finally:
            run.process.terminate()
            try:
                run.process.wait(END_S)
            except subprocess.TimeoutExpired:
                run.process.kill()


def wait_for_ranks(run: Run) -> None:
    """Wait until each rank has begun what its mode says."""
    files = [run.folder / f"rank.{rank}" for rank in range(run.ranks)]
    if not run.until(lambda: all(path.exists() for path in files), "the start of the ranks"):
        sys.exit(f"gpu_checks.py: ddprun ended at once:\n{run.log.read_text()}")


def outcome(run: Run) -> Outcome:
    run.process.wait(START_S)
    return read_outcome((run.node / "outcome.json").read_text())


def results(run: Run) -> list[dict[str, Any]]:
    """Wait for the end, and return what the ranks have written."""
    if code := run.process.wait(START_S):
        sys.exit(f"gpu_checks.py: ddprun exited with {code}:\n{run.log.read_text()}")
    return [json.loads((run.folder / f"rank.{rank}").read_text()) for rank in range(run.ranks)]


def backends(device: str, facts: Facts) -> None:
    """One rank under NCCL and two ranks of gloo on one GPU, and what torch's flight recorders keep of them."""
    for name, ranks, options in (("nccl", 1, ()), ("gloo", 2, ("--backend=gloo",))):
        with job("losses", device, ranks, *options) as run:
            answers = results(run)
        facts.add(f"{name}: backend", answers[0]["backends"][0])
        recorded, unrecorded = answers[0]["recorded"], answers[0]["unrecorded"]
        facts.add(f"{name}: recorded collectives", recorded, right=any(recorded.values()) or unrecorded)
        facts.add(f"{name}: without a flight recorder", unrecorded)
        finite = all(math.isfinite(loss) for result in answers for loss in result["losses"])
        facts.add(f"{name}: losses are finite", finite, right=finite)


def losses(device: str, facts: Facts) -> None:
    """Train a plain script and a ResNet-18 under torchrun and ddprun. The losses are the same, bit for bit."""
    for model in ("mlp", "resnet18"):
        options = (f"--model={model}", f"--steps={10 if device == 'cuda' else 2}")
        with job("losses", device, 1, *options) as run:
            (ours,) = results(run)
        with tempfile.TemporaryDirectory() as folder:
            script = [RANK, "losses", f"--device={device}", f"--out={folder}/rank", *options]
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", *script]
            subprocess.run(command, check=True, timeout=START_S, env=measuring.clean_environ())
            theirs = json.loads(Path(folder, "rank.0").read_text())
        facts.add(f"{model}: last loss", ours["losses"][-1], right=ours["losses"] == theirs["losses"])
        for name in ("seconds", "rss_mb", "gpu_mb"):
            facts.add(f"{model}: {name}, ddprun and torchrun", [round(each[name], 2) for each in (ours, theirs)])


def one_training(*options: str, facts: Facts, name: str, device: str) -> list[dict[str, Any]]:
    """Train in this process, as ddptrain does. Add the seconds and the peak of GPU memory. Return the events."""
    import torch

    from ddprank.signals import Signals
    from ddptrain.config import parse_options
    from ddptrain.main import run

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        given = ["--epochs=1", *options, f"--device={device}", f"--checkpoint-dir={folder}/checkpoints"]
        file = Path(folder, "events")
        code = run(parse_options(given, {}), os.environ | {EVENTS_FILE: str(file)}, Signals())
        events = [json.loads(line) for line in file.read_text().splitlines()]
    facts.add(f"{name}: exit code", code, right=code == 0)
    facts.add(f"{name}: seconds", round(time.monotonic() - began, 2))
    if device == "cuda":
        facts.add(f"{name}: peak MB", torch.cuda.max_memory_allocated() >> 20)
    return events


def data_options(recipe: str, folder: Path, device: str) -> list[str]:
    """Return the options that give a recipe small data of its format, without a network."""
    kind = recipe.partition("-")[0]
    if kind == "text":
        (folder / "text.txt").write_text("a small text of which a model learns the bytes. " * 200)
        small = ["--layers=1", "--width=16", "--batch-size=64"] if device == "cpu" else ["--batch-size=4"]
        return [f"--data-dir={folder}/text.txt", "--context=64", *small]
    if kind == "folder":
        from PIL import Image

        for number in range(16):
            for part in ("train", "val"):
                path = folder / part / f"class-{number % 2}" / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (64, 64), (16 * number, 0, 255)).save(path)
        return [f"--data-dir={folder}", "--image-size=224" if device == "cuda" else "--image-size=32", "--batch-size=8"]
    shape = "3x32x32" if kind.startswith("cifar") else "1x28x28"
    few = [SAMPLES, "--batch-size=128"] if device == "cuda" else ["--synthetic-samples=8", "--batch-size=8"]
    classes = 100 if kind == "cifar100" else 10
    return ["--data=synthetic", f"--synthetic-shape={shape}", f"--synthetic-classes={classes}", *few]


def weights_options(recipe: str, folder: Path) -> list[str]:
    """Return the option that gives a recipe weights of its model, which it would download."""
    import torch
    import torchvision

    from ddptrain.recipes import read_recipe

    options = dict(option.removeprefix("--").partition("=")[::2] for option in read_recipe(recipe))
    if "pretrained" not in options:
        return []
    model = getattr(torchvision.models, options["model"].removeprefix("torchvision:"))(num_classes=1000)
    torch.save(model.state_dict(), folder / "weights.pt")
    return [f"--pretrained={folder}/weights.pt"]


def train_recipes(device: str, facts: Facts, precisions: tuple[str, ...]) -> None:
    from ddptrain.recipes import recipe_names

    for recipe in recipe_names():
        if device == "cpu" and recipe not in CPU_RECIPES:
            continue
        with tempfile.TemporaryDirectory() as name:
            options = [*data_options(recipe, Path(name), device), *weights_options(recipe, Path(name))]
            for precision in precisions:
                how = (f"--recipe={recipe}", f"--precision={precision}", *options)
                one_training(*how, facts=facts, name=f"{recipe} {precision}", device=device)


def recipes(device: str, facts: Facts) -> None:
    """Train an epoch of each recipe in bf16, on small data of its format."""
    train_recipes(device, facts, ("bf16",))


def grid(device: str, facts: Facts) -> None:
    """Train an epoch of each recipe in each precision."""
    train_recipes(device, facts, PRECISIONS[device])


def speed_runs(device: str, facts: Facts, data_dir: str = "") -> None:
    """Train the recipes of the speed runs. Without CIFAR-10, images of its format give only the seconds."""
    from ddptrain.recipes import read_recipe

    for recipe, published in (("cifar10-94", 0.9401), ("cifar10-96", 0.9603)):
        epochs = next(option for option in read_recipe(recipe) if option.startswith("--epochs="))
        options = [f"--data-dir={data_dir}", epochs]
        if device == "cpu":
            options = data_options(recipe, Path(), device)
        elif not data_dir:
            options = ["--data=synthetic", "--synthetic-shape=3x32x32", "--synthetic-samples=50000", epochs]
        events = one_training(f"--recipe={recipe}", *options, facts=facts, name=recipe, device=device)
        ended = [event for event in events if event["event"] == "epoch_ended"]
        facts.add(f"{recipe}: seconds in steps", round(sum(event["seconds"] for event in ended), 2), right=ended)
        if data_dir:
            accuracy = ended[-1]["accuracy"]
            facts.add(f"{recipe}: accuracy, published", [accuracy, published], right=accuracy > published - NEAR)


def ways(device: str, facts: Facts) -> None:
    """Train in fp32, fp16 with GradScaler, bf16, with both memory formats, and from a loader."""
    few = (
        ("--model=convnet", "--synthetic-samples=64", "--batch-size=16")
        if device == "cpu"
        else ("--model=resnet18", SAMPLES)
    )
    for options in (
        ("--precision=fp32",),
        ("--precision=fp16", "--channels-last") if device == "cuda" else ("--precision=bf16",),
        ("--precision=bf16", "--no-channels-last"),
        ("--precision=bf16", "--input=loader", "--accumulate=2", "--clip=1"),
    ):
        images = ("--data=synthetic", "--synthetic-shape=3x32x32", *few)
        one_training(*images, *options, facts=facts, name=" ".join(options), device=device)


def compiled(device: str, facts: Facts) -> None:
    """Train with torch.compile: its default mode, and CUDA graphs."""
    small = ("--data=synthetic", "--model=simple", "--batch-size=64", SAMPLES)
    for mode in ("default", "reduce-overhead") if device == "cuda" else ("default",):
        one_training(*small, f"--compile={mode}", facts=facts, name=f"--compile {mode}", device=device)


def ends(device: str, facts: Facts) -> None:
    """End a rank by a full memory, an assert in a kernel, and a kill in a kernel. The cause is named."""
    expected: dict[str, tuple[str, ...]] = {
        "out_of_memory": ("out of memory",),
        "device_assert": ("assert", "out of bounds"),
        "killed_in_kernel": ("SIGKILL",),
    }
    for mode, texts in expected.items():
        before_mb = gpu_mb(device)
        with job(mode, device, 1) as run:
            if mode == "killed_in_kernel":
                wait_for_ranks(run)
                run.kill(0)
            children = psutil.Process(run.process.pid).children(recursive=True)
            ended = outcome(run)
            facts.add(f"{mode}: exit code", ended.code, right=ended.code != 0)
            facts.add(f"{mode}: message", ended.message, right=any(text in ended.message for text in texts))
            _, alive = psutil.wait_procs(children, timeout=5)
        facts.add(f"{mode}: processes left", len(alive), right=not alive)
        used = wait_for_memory(device, before_mb)
        facts.add(f"{mode}: GPU memory left, MB", used, right=used <= FREE_MB)


def wait_for_memory(device: str, before_mb: int) -> int:
    """Wait until the GPU's memory is free again. Return how many MB more than before are in use."""
    deadline = time.monotonic() + 10.0
    while (used_mb := gpu_mb(device) - before_mb) > FREE_MB and time.monotonic() < deadline:
        time.sleep(0.1)
    return used_mb


def explains(device: str, facts: Facts) -> None:
    """Explain a hang in a kernel and a hang in a collective of NCCL."""
    for mode, ranks in (("hang_in_kernel", 2), ("hang_in_collective", 1 if device == "cuda" else 2)):
        with job(mode, device, ranks) as run:
            wait_for_ranks(run)
            explanation: dict[str, Any] = {}
            deadline = time.monotonic() + START_S / 3
            while not is_named(mode, explanation) and time.monotonic() < deadline:
                time.sleep(0.5)
                explanation = explained(run.node.parent)
            pids = [rank.pid for rank in read_node((run.node / "node.json").read_text()).ranks]
        facts.add(f"{mode}: sentence", explanation.get("sentence"), right=is_named(mode, explanation))
        for name in ("cause", "rank", "evidence", "unknown"):
            facts.add(f"{mode}: {name}", explanation.get(name))
        survivors = [pid for pid in pids if psutil.pid_exists(pid)]
        facts.add(f"{mode}: ranks left", survivors, right=not survivors)


def is_named(mode: str, explanation: dict[str, Any]) -> bool:
    """Return whether an explanation names the place of a hang, and rank 1 if the others wait for it."""
    is_blocked = explanation.get("rank") == 1 if mode == "hang_in_kernel" else "all_reduce" in str(explanation)
    return is_blocked and "gpu_rank.py" in str(explanation)


def metrics(device: str, facts: Facts) -> None:
    """Compare the GPU metrics of ddprun with nvidia-smi."""
    names = {
        "ddp_device_memory_used_bytes": ("memory.used", 1 << 20, 0.05),
        "ddp_device_power_watts": ("power.draw", 1.0, 0.5),
        "ddp_device_temperature_celsius": ("temperature.gpu", 1.0, 0.3),
        "ddp_device_utilization_ratio": ("utilization.gpu", 0.01, 1.0),
    }
    with job("held", device, 1) as run:
        wait_for_ranks(run)
        time.sleep(2.0 if device == "cuda" else 0.0)  # NVML's utilization is of the last second
        url = (run.node / METRICS_URL).read_text()
        with urllib.request.urlopen(url, timeout=10) as reply:  # noqa: S310 - the node's own address
            text = reply.read().decode()
        if device == "cuda":
            query = f"--query-gpu={','.join(name for name, *_ in names.values())}"
            command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
            line = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()[
                0
            ]
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    facts.add("series", len(values), right=any(name.startswith("ddp_") for name in values))
    if device == "cuda":
        for (name, (_, unit, tolerance)), cell in zip(names.items(), line.split(", "), strict=True):
            ours, theirs = float(values[f'{name}{{device="0"}}']), unit * float(cell)
            close = math.isclose(ours, theirs, rel_tol=tolerance, abs_tol=tolerance)
            facts.add(f"{name}, nvidia-smi", [ours, theirs], right=close)


def check_nodes(device: str, facts: Facts) -> None:
    """Run doctor's checks of this node's GPU, and the bench of the collectives."""
    environ = measuring.clean_environ() | ({"DDP_DEVICE": "cpu"} if device == "cpu" else {})
    for check, ranks in (("doctor", "1"), ("bench", "2")):
        command = [sys.executable, "-m", "ddprun", "--nproc-per-node", ranks, "--no-prefix", "-m", "ddpcheck", check]
        command += ["--sizes=4096,65536"] if check == "bench" else []
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ, check=False)
        name = f"{check} of {ranks}"
        facts.add(f"{name}: exit code", done.returncode, right=done.returncode in (0, 69))
        try:
            result = json.loads(done.stdout[done.stdout.index("\n{\n" if check == "bench" else "{") :])
        except ValueError:
            facts.add(f"{name}: output", (done.stdout + done.stderr)[-2000:], right=False)
            continue
        for finding in result.get("results", ()):
            if finding["status"] != "ok":
                facts.add(f"{finding['check']}: {finding['status']}", finding["value"])
        seen = [finding["check"] for finding in result.get("results", ()) if finding["status"] == "ok"]
        if check == "doctor":
            expected = ("GPU memory", "GPU clocks", "GPU matmul") if device == "cuda" else ()
            facts.add("checks that are ok", seen, right=set(expected) <= set(seen))
        else:
            facts.add(
                f"{name}: backend, findings", [result["backend"], result["findings"]], right=not result["findings"]
            )


def sharded(device: str, facts: Facts) -> None:
    """Train with fully_shard (FSDP) in one rank, and continue from its checkpoint."""
    facts.add("device", device)  # examples/fsdp.py takes a GPU if there is one
    with tempfile.TemporaryDirectory() as folder:
        for steps in (20, 30):
            run = Run(Path(folder), 1, str(steps), script=("--no-prefix", str(ROOT / "examples" / "fsdp.py")))
            text = run.end()
            facts.add(f"{steps} steps", text.strip().splitlines()[-1])
        facts.add("continued", "steps 21 to 30" in text, right="steps 21 to 30" in text)


def profiled(device: str, facts: Facts) -> None:
    """Record a profile of a rank with a process group, with the kernels of the GPU."""
    with job("losses", device, 1, "--steps=1000000") as run:
        run.until(lambda: (run.node / "node.json").exists(), "the node's file")
        trace, answer = run.folder / "trace.json.gz", ""
        deadline = time.monotonic() + START_S
        while not trace.exists() and time.monotonic() < deadline:  # the rank has no process group yet
            command = [sys.executable, "-P", "-m", "ddpctl", "profile", "--json", "--seconds=1", "-o", str(trace)]
            command.append(str(run.node.parent))
            done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
            answer = done.stdout or done.stderr
        facts.add("result", answer[-600:], right=trace.exists())
        if trace.exists():
            events = gzip.decompress(trace.read_bytes())
            kernels = events.count(b'"kernel"')
            facts.add("bytes, kernels", [len(events), kernels], right=kernels > 0 or device == "cpu")


def forecast(device: str, facts: Facts) -> None:
    """Compare the memory that ``ddptrain fit`` forecasts with the peak of a step, for six models."""
    import argparse

    import torch
    from torch import nn

    from ddptrain import memory_estimate
    from ddptrain.data.base import ImageShape
    from ddptrain.models import build_model

    for name in MODELS if device == "cuda" else MODELS[:2]:
        arguments = [f"--model={name}", "--image=3x64x64", "--batch-size=64", "--dtype=fp32"]
        given: argparse.Namespace = memory_estimate._parser().parse_args(arguments)
        size = memory_estimate.TrainingSize(
            num_parameters=0, optimizer=given.optimizer, dtype=given.dtype, bucket_view=True, shards_all=1
        )
        case, _ = memory_estimate._measure_model(given, size)
        rows = {row: size or 0.0 for row, size, _ in case.rows()}
        forecast = sum(size for row, size in rows.items() if "librar" not in row.lower())
        if device == "cpu":
            facts.add(f"{name}: forecast, MB", round(forecast / 1e6))
            continue
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = build_model(name, ImageShape(channels=3, size_px=64, classes=10)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        images, labels = torch.randn(64, 3, 64, 64, device=device), torch.arange(64, device=device) % 10
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        peak = torch.cuda.max_memory_allocated() - before
        ratio = peak / forecast
        facts.add(f"{name}: forecast, peak in MB", [round(forecast / 1e6), round(peak / 1e6)], right=ratio < FORECAST)
        del model, optimizer, images, labels


CHECKS = {
    function.__name__: function
    for function in (
        *(backends, losses, recipes, ways, compiled, ends, explains, metrics, check_nodes),
        *(sharded, profiled, forecast, grid, speed_runs),
    )
}


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--data-dir", default="", help="folder of CIFAR-10, for speed_runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    facts = Facts()
    try:
        CHECKS[args.check](args.device, facts, *([args.data_dir] if args.data_dir else []))
    finally:
        measuring.write_json(args.json, {"facts": facts.values, "wrong": facts.wrong})
    if facts.wrong:
        sys.exit(f"not as expected: {', '.join(facts.wrong)}")
    print(f"{len(facts.values)} facts as expected")


if __name__ == "__main__":
    main()
