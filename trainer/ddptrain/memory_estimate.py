"""``ddptrain fit``: estimate whether a training fits into a GPU's memory, and show the calculation.

torch is imported only to measure a model or to read the memory of this machine's GPU.
"""

import argparse
import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddptrain.config import MODELS, SHARDED, TEXT_MODEL, ModelOptions, Options, Parser, RankOptions, image_shape, whole
from ddptrain.errors import TrainError, log_warning
from ddpwire.exits import Exit
from ddpwire.machine import GIB, MIB

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ddptrain.data.base import ImageShape
    from ddptrain.distributed import World

OPTIMIZER_MOMENTS = {"adamw": 2, "sgd": 1, "muon": 1, "plain-sgd": 0}  # numbers in the optimizer's state per parameter
DTYPE_BYTES = {"fp32": 4, "amp": 4, "bf16": 2, "fp16": 2}  # per parameter; amp: mixed precision, computed in 16 bits
LIBRARY_BYTES = 2 * GIB
MAX_RANKS = 4096  # the largest number of ranks that is tried
WHOLE_LAYERS = 3  # with FSDP: the weights of the running layer and of the next layer, and a gradient
EPILOG = """\
Examples:
  ddptrain fit --params 8e9 --optimizer adamw --dtype fp32 --memory 80GB
  ddptrain fit --model resnet18 --image 3x224x224 --batch-size 256 --memory 16GB
  ddptrain fit --model gpt --layers 32 --width 4096 --heads 32 --optimizer adamw --batch-size 4 --memory 80GB

The exit code is 0 if the training fits and 78 if it does not. A size in GB is read as GiB, as in the names of GPUs.
"""


@dataclass(frozen=True, kw_only=True)
class TrainingSize:
    """The values that determine how much memory a training needs."""

    num_parameters: float
    optimizer: str
    dtype: str
    bucket_view: bool = False
    activations: float | None = None  # bytes; None: unknown
    batch_size: int = 0
    state_bytes: float | None = None  # of the optimizer's state per parameter; None: computed from the moments
    shards_optimizer: int = 1  # ranks that share the optimizer's state
    shards_all: int = 1  # ranks that share everything
    largest_layer: float | None = None  # parameters that FSDP gathers at a time; None: unknown
    recomputed: float | None = None  # bytes of activations with --recompute; None: unknown, or it is already in use

    def rows(self) -> list[tuple[str, float | None, str]]:
        """Return the rows of the calculation: a name, its size in bytes (None if unknown), and how it is computed."""
        number, width = self.num_parameters, DTYPE_BYTES[self.dtype]
        compute = 2 if self.dtype == "amp" else width
        moments = OPTIMIZER_MOMENTS[self.optimizer]
        state = moments * width if self.state_bytes is None else self.state_bytes
        count = f"{number:,.0f} x"
        shared = f" / {self.shards_all} ranks" if self.shards_all > 1 else ""
        states_shared = shared or (f" / {self.shards_optimizer} ranks" if self.shards_optimizer > 1 else "")
        weights = number * width / self.shards_all
        states = number * state / self.shards_all / self.shards_optimizer
        if self.bucket_view:
            bucket_bytes, buckets = 0.0, "no extra memory: the gradients are views of the buckets"
        elif self.shards_all > 1:
            bucket_bytes, buckets = 0.0, "none with FSDP"
        else:
            bucket_bytes, buckets = weights, f"{count} {width} bytes: a second copy of the gradients"
        kept = f"kept for the backward pass, for a batch of {self.batch_size}"
        kept = kept if self.activations is not None else "not known without --model and --batch-size"
        values = f"{moments} value{'s' * (moments != 1)}"
        how = f"{count} {state:g} bytes: {values} for each parameter ({self.optimizer}){states_shared}"
        rows: list[tuple[str, float | None, str]] = [
            ("parameters", weights, f"{count} {width} bytes{shared}"),
            ("gradients", weights, f"{count} {width} bytes{shared}"),
            ("optimizer", states, how),
            ("DDP's buckets", bucket_bytes, buckets),
            ("activations", self.activations, kept),
        ]
        if self.shards_all > 1:
            size = None if self.largest_layer is None else self.largest_layer * WHOLE_LAYERS * min(width, compute)
            how = "not known without --model" if size is None else f"{WHOLE_LAYERS} x {self.largest_layer:,.0f}"
            rows.append(("whole layers", size, f"{how}: two layers' weights and a gradient"))
        elif self.dtype == "amp":
            rows.append(("16-bit copies", number * 2, f"{count} 2 bytes: autocast keeps them"))
        return [*rows, ("libraries", LIBRARY_BYTES, "CUDA, cuBLAS, cuDNN, NCCL: an estimate")]

    def total(self) -> float:
        """Return the sum of the known sizes in bytes."""
        return sum(size or 0.0 for _, size, _ in self.rows())


def suggestions(case: TrainingSize, *, ranks: int) -> Iterator[tuple[str, TrainingSize]]:
    """Yield changes that may reduce the needed memory. Each item is a description and the changed training."""
    lean = replace(case, bucket_view=True)
    if not case.bucket_view:
        yield "gradients as views of DDP's buckets (gradient_as_bucket_view)", lean
    if case.activations and case.batch_size > 1:
        half = replace(case, activations=case.activations / 2, batch_size=case.batch_size // 2)
        yield f"batches of {half.batch_size} on each rank", half
    if case.recomputed is not None:
        yield "activations computed again (--recompute)", with_recompute(case)
    if case.optimizer == "adamw":
        yield "bucket views, and an 8-bit AdamW (bitsandbytes, torchao)", replace(lean, state_bytes=2.0)
    if DTYPE_BYTES[case.dtype] == 4:
        yield "bucket views, and weights, gradients and moments in bf16", replace(lean, dtype="bf16")
    if OPTIMIZER_MOMENTS[case.optimizer]:
        yield f"bucket views, and ZeroRedundancyOptimizer on {ranks} ranks", replace(lean, shards_optimizer=ranks)
    yield f"FSDP instead of DDP on {ranks} ranks", replace(case, shards_all=ranks)


def with_recompute(case: TrainingSize) -> TrainingSize:
    """Return the same training, but with ``--recompute``."""
    return replace(case, activations=case.recomputed, recomputed=None)


def fewest_shards(case: TrainingSize, memory: float) -> TrainingSize | None:
    """Return the training with FSDP on as few ranks as possible, so that each rank needs at most ``memory`` bytes.

    The number is a power of two. The result uses ``--recompute`` only if this number of ranks requires it. Return None
    if even MAX_RANKS ranks are too few.
    """
    counts = [1 << power for power in range(1, MAX_RANKS.bit_length())]
    trials = [replace(variant, shards_all=count) for count in counts for variant in (case, with_recompute(case))]
    known = (trial for trial in trials if case.activations is None or trial.activations is not None)
    return next((trial for trial in known if trial.total() <= memory), None)


def estimate_message(case: TrainingSize, *, title: str, memory: float, ranks: int, options: str | None = None) -> str:
    """Return the estimate as a text. ``options`` of ddptrain lack the batch size, or are None if it cannot run this."""
    lines = [f"{title}, on a GPU of {_gib(memory)}", ""]
    for name, size, how in case.rows():
        lines.append(f"  {name:15} {'?' if size is None else _gib(size):>11}   {how}")
    lines += [f"  {'total':15} {_gib(case.total()):>11}", ""]
    open_end = " plus the activations" if case.activations is None else ""
    if case.total() <= memory:
        fits = f"it fits into {_gib(memory)}: {_gib(case.total())}"
        unknown = f"without the activations, it needs {_gib(case.total())} of the {_gib(memory)}"
        unknown += "; the size of the activations is not known"
        return "\n".join([*lines, unknown if open_end else fits])
    lines += [f"it does not fit into {_gib(memory)}: {_gib(case.total())}{open_end}", "", "What would help:"]
    for idea, better in suggestions(case, ranks=ranks):
        outcome = "fits" if better.total() <= memory else "still too much"
        lines.append(f"  {_gib(better.total()):>11}  {outcome:15} {idea}")
    sharded = fewest_shards(case, memory) if case.shards_all == 1 else None
    if sharded is not None:
        if_known = ", if the activations also fit" if case.activations is None else ""
        lines += ["", f"it does not fit with ddp; it fits with fsdp on {sharded.shards_all} ranks{if_known}"]
        if options is not None:
            again = " --recompute" if sharded.recomputed is None and case.recomputed is not None else ""
            batch = f"--batch-size {sharded.batch_size * sharded.shards_all}"
            lines[-1] += f":\n  ddpctl launch --gpus {sharded.shards_all} -- --strategy fsdp {options} {batch}{again}"
    return "\n".join(lines)


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / MIB:,.1f} MiB"


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit code. Raises TrainError."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if (given.params is None) == (given.model is None):
        parser.error("give --params or --model")
    if given.bucket_view is None:  # ddptrain's default for its own models, torch's for any other
        given.bucket_view = given.model is not None and RankOptions().bucket_view
    given.dtype = given.dtype or ("fp32" if given.model is None else "amp")
    memory = given.memory if given.memory is not None else gpu_memory()
    if memory is None:
        hint = "give --memory, such as --memory 80GB"
        raise TrainError(Exit.USAGE, "the memory is unknown, because this machine has no GPU", hint=hint)
    fits, text = _answer(given, memory, _launch_options(given))
    print(text)
    return Exit.OK if fits else Exit.CONFIG


def warn_if_too_large(options: Options, world: "World", shape: "ImageShape | None", batch_size: int) -> None:
    """Print the estimate on rank 0 if a training does not fit on its GPU. ``shape`` is None for a text."""
    memory, size = gpu_memory(world.device), world.rank_info.size
    if memory is None or not world.rank_info.is_first or options.machine.precision == "fp64":
        return
    plain = options.optimizer.name == "sgd" and not options.optimizer.momentum
    known = {
        **vars(options.model),
        "model": options.model.name,
        "context": options.data.context,
        "dtype": "fp32" if options.machine.precision == "fp32" else "amp",
        "optimizer": "plain-sgd" if plain else options.optimizer.name,
        "batch_size": math.ceil(batch_size / size / options.training.accumulate),
        "bucket_view": size == 1 or options.ranks.bucket_view,
    }
    if shape is not None:
        known |= {"image": (shape.channels, shape.size_px, shape.size_px), "classes": shape.classes}
    if size > 1 and options.ranks.strategy in SHARDED:
        known |= {"strategy": options.ranks.strategy, "ranks": size, "ranks_per_node": world.rank_info.local_world_size}
    given = _parser().parse_args([], argparse.Namespace(**known))
    with contextlib.suppress(TrainError, RuntimeError):  # what is wrong with the model is an error when it is built
        fits, text = _answer(given, memory, "...")
        if not fits:
            log_warning(f"too little GPU memory for {text}")


def _answer(given: argparse.Namespace, memory: float, options: str | None) -> tuple[bool, str]:
    wrapped, num_shards = {
        "ddp": ("DistributedDataParallel", 1),
        "fsdp": ("FSDP", given.ranks),
        "hybrid": ("hybrid FSDP", given.ranks_per_node),
    }[given.strategy]
    case = TrainingSize(
        num_parameters=given.params or 0,
        optimizer=given.optimizer,
        dtype=given.dtype,
        bucket_view=given.bucket_view,
        shards_all=num_shards,
    )
    name = f"{case.num_parameters:,.0f} parameters"
    if given.model is not None:
        case, name = _measure_model(given, case)
    title = f"{name}, {given.optimizer}, {given.dtype}, {wrapped}"
    text = estimate_message(case, title=title, memory=memory, ranks=given.ranks, options=options)
    return case.total() <= memory, text


def parse_size(text: str) -> float:
    """Return a size in bytes. 80GB, 80GiB and 80 mean the same. MB, MiB, TB and TiB are accepted, too."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?)?", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 80GB")
    return float(match[1]) * 1024.0 ** "KMGT".index((match[2] or "G").upper()) * 1024


def parse_count(text: str) -> float:
    """Return a number of parameters, given a text such as 8e9, 8000000000, 8B or 350M."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text, re.IGNORECASE)
    value = float(match[1]) * 1000.0 ** " KMBT".index(match[2].upper() or " ") if match else 0.0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters such as 8e9 or 8B")
    return value


def _parser() -> Parser:
    parser = Parser(
        prog="ddptrain fit",
        description="Estimate whether a training fits into a GPU's memory. Show the calculation and what would help.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--params", type=parse_count, metavar="N", help="number of parameters of any model, such as 8e9 or 8B")
    models = f"{', '.join(MODELS)}, {TEXT_MODEL}, or a classifier of torchvision"
    add("--model", metavar="NAME", help=f"a model that ddptrain can train, instead of --params: {models}")
    add("--image", type=image_shape, default=(3, 32, 32), metavar="CxHxW", help="image shape (default: 3x32x32)")
    add("--classes", type=whole(2), default=10, metavar="N", help="number of classes (default: 10)")
    for name, default in (("layers", 4), ("width", 128), ("heads", 4), ("context", 256)):
        text = f"of gpt, as in ddptrain (default: {default})"
        add(f"--{name}", type=whole(1), default=default, metavar="N", help=text)
    add("--recompute", action="store_true", help="estimate for activations that are recomputed")
    add("--strategy", choices=("ddp", *SHARDED), default="ddp", help="how the training is distributed (default: ddp)")
    add("--batch-size", type=whole(1), default=128, metavar="N", help="batch size of each rank (default: 128)")
    add("--optimizer", choices=tuple(OPTIMIZER_MOMENTS), default="sgd", help="plain-sgd has no momentum (default: sgd)")
    amp = "precision; amp: autocast, ddptrain's default on a GPU (default: amp with --model, else fp32)"
    add("--dtype", choices=tuple(DTYPE_BYTES), help=amp)
    views = "make the gradients views of DDP's buckets (default: yes with --model, else no)"
    add("--bucket-view", action=argparse.BooleanOptionalAction, help=views)
    add("--memory", type=parse_size, metavar="SIZE", help="memory of one GPU: 80GB (default: this machine's GPU)")
    add("--ranks", type=whole(2), default=8, metavar="N", help="number of ranks over which to shard (default: 8)")
    add("--ranks-per-node", type=whole(2), default=8, metavar="N", help="the same for hybrid (default: 8)")
    return parser


def _measure_model(given: argparse.Namespace, case: TrainingSize) -> tuple[TrainingSize, str]:
    """Return ``case`` with a model's size, and its description. Its activations are measured on the meta device."""
    import torch

    from ddptrain.data.base import ImageShape
    from ddptrain.models import blocks_of, build_gpt, build_model
    from ddptrain.training_state import enable_recompute

    channels, size_px, _ = given.image
    is_gpt = given.model == TEXT_MODEL
    dtype = torch.float32 if given.dtype == "fp32" else torch.float16 if given.dtype == "fp16" else torch.bfloat16
    with torch.device("meta"):
        if is_gpt:
            shape = ModelOptions(name=TEXT_MODEL, layers=given.layers, width=given.width, heads=given.heads)
            model: nn.Module = build_gpt(shape, context=given.context)
            batch = torch.zeros(given.batch_size, given.context, dtype=torch.int64)
        else:
            model = build_model(given.model, ImageShape(channels=channels, size_px=size_px, classes=given.classes))
            batch = torch.empty(given.batch_size, channels, size_px, size_px, dtype=dtype)
        model = model.to(dtype)
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks_of(model)]
    kept = activation_bytes(model, batch)
    enable_recompute(model)
    recomputed = activation_bytes(model, batch)
    recomputed += (kept - recomputed) // max(1, len(blocks))  # plus the activations of one recomputed layer
    count = sum(parameter.numel() for parameter in model.parameters())
    case = replace(
        case,
        num_parameters=count,
        activations=kept,
        batch_size=given.batch_size,
        largest_layer=max([count - sum(blocks), *blocks]),
        recomputed=recomputed,
    )
    seen = f"with a context length of {given.context} bytes" if is_gpt else f"on {channels}x{size_px}x{size_px}"
    return with_recompute(case) if given.recompute else case, f"{given.model} ({count:,} parameters) {seen}"


def _launch_options(given: argparse.Namespace) -> str | None:
    """Return ddptrain's options for this training, or None if ddptrain cannot run it."""
    if given.model is None or given.dtype not in ("amp", "fp32") or given.optimizer == "plain-sgd":
        return None
    options = f"--model {given.model} --optimizer {given.optimizer}"
    if given.model == TEXT_MODEL:
        options += f" --data text --data-dir FILE --layers {given.layers} --width {given.width}"
        options += f" --heads {given.heads} --context {given.context}"
    if given.dtype == "fp32":
        options += " --precision fp32"
    return options + (" --recompute" if given.recompute else "")


def gpu_memory(device: "torch.device | None" = None) -> float | None:
    """Return the bytes of memory of a GPU (default: the first one). Return None for a CPU or if there is no GPU."""
    import torch

    if not torch.cuda.is_available() or (device is not None and device.type == "cpu"):
        return None
    return float(torch.cuda.get_device_properties(device or 0).total_memory)


def activation_bytes(model: "nn.Module", batch: "Tensor") -> int:
    """Return the bytes that autograd saves for the backward pass, not counting the parameters."""
    import torch

    from ddptrain import compat

    parameters = {compat.storage_id(parameter) for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}  # keyed by storage; the tensors are kept so that no address is reused

    def keep(tensor: "Tensor") -> "Tensor":
        storage = compat.storage_id(tensor)
        if storage not in parameters:
            kept[storage] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(batch).sum()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
