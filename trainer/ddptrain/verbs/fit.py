"""``ddptrain fit``: does it fit into the GPU's memory? Answered before anything is launched."""

import argparse
import re
from collections.abc import Sequence

from ddptrain.errors import TrainError
from ddptrain.options.command import Parser
from ddptrain.options.field import image_shape, whole
from ddptrain.options.machine import MachineOptions
from ddptrain.options.model import MODELS
from ddptrain.options.ranks import RankOptions
from ddptrain.verbs.need import BYTES, MOMENTS, Case, told
from ddpwire.exits import Exit

EPILOG = """\
Examples:
  ddptrain fit --params 8e9 --optimizer adamw --dtype fp32 --memory 80GB
  ddptrain fit --model resnet18 --image 3x224x224 --batch-size 256 --memory 16GB

The exit code is 0 when it fits and 78 when it does not. A GPU of 80 GB is one of 80 GiB: so they are sold.
"""


def main(arguments: Sequence[str]) -> int:
    """Answer. Raises TrainError."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if (given.params is None) == (given.model is None):
        parser.error("give --params or --model")
    _fill_in(given)
    memory = given.memory if given.memory is not None else _memory_here()
    if given.model is not None:
        case, name = _of_model(given)
    else:
        case = Case(
            num_parameters=given.params, optimizer=given.optimizer, dtype=given.dtype, bucket_view=given.bucket_view
        )
        name = f"{given.params:,.0f} parameters"
    title = f"{name}, {given.optimizer}, {given.dtype}, DistributedDataParallel"
    print(told(case, title=title, memory=memory, ranks=given.ranks))
    return Exit.OK if case.total() <= memory else Exit.CONFIG


def size(text: str) -> float:
    """An argparse type: 80GB, 80GiB and 80 are the same; MB, MiB, TB and TiB too."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?)?", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 80GB")
    return float(match[1]) * 1024.0 ** "KMGT".index((match[2] or "G").upper()) * 1024


def number(text: str) -> float:
    """An argparse type: 8e9, 8000000000, 8B or 350M."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text, re.IGNORECASE)
    value = float(match[1]) * 1000.0 ** " KMBT".index(match[2].upper() or " ") if match else 0.0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters such as 8e9 or 8B")
    return value


def _parser() -> Parser:
    parser = Parser(
        prog="ddptrain fit",
        description="Say whether a training fits into a GPU's memory, with the arithmetic, and what would help.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--params", type=number, metavar="N", help="parameters of any model: 8e9, 8B")
    models = f"{', '.join(MODELS)}, or a classifier of torchvision"
    parser.add_argument("--model", metavar="NAME", help=f"instead, a model that ddptrain knows: {models}")
    parser.add_argument("--image", type=image_shape, default=(3, 32, 32), metavar="CxHxW", help="(default: 3x32x32)")
    parser.add_argument("--classes", type=whole(2), default=10, metavar="N", help="(default: 10)")
    parser.add_argument("--batch-size", type=whole(1), default=128, metavar="N", help="on each rank (default: 128)")
    parser.add_argument("--optimizer", choices=tuple(MOMENTS), default="sgd", help="(default: sgd, with momentum)")
    parser.add_argument(
        "--dtype",
        choices=tuple(BYTES),
        help="amp: autocast (default: amp with --model, as ddptrain does it on a GPU, else fp32)",
    )
    parser.add_argument(
        "--bucket-view",
        action=argparse.BooleanOptionalAction,
        help="gradients are views of DDP's buckets (default: with --model as in ddptrain, else torch's: not)",
    )
    parser.add_argument("--memory", type=size, metavar="SIZE", help="of one GPU: 80GB (default: of the GPU here)")
    parser.add_argument("--ranks", type=whole(2), default=8, metavar="N", help="to share among, for what would help")
    return parser


def _fill_in(given: argparse.Namespace) -> None:
    """What ddptrain does by itself for its own models; for any other, what torch does."""
    if given.bucket_view is None:
        given.bucket_view = given.model is not None and RankOptions().bucket_view
    if given.dtype is None:
        precision = MachineOptions().precision if given.model is not None else "fp32"
        given.dtype = "fp32" if precision == "fp32" else "amp"  # auto: 16 bits on a GPU


def _of_model(given: argparse.Namespace) -> tuple[Case, str]:
    """The case of one of our models: its parameters counted, its activations measured on the meta device."""
    import torch

    from ddptrain.models import ImageShape, build_model
    from ddptrain.verbs.activations import saved_bytes

    channels, size_px, _ = given.image
    dtype = torch.float32 if given.dtype == "fp32" else torch.float16 if given.dtype == "fp16" else torch.bfloat16
    with torch.device("meta"):
        model = build_model(given.model, ImageShape(channels=channels, size_px=size_px, classes=given.classes))
        model = model.to(dtype)
        batch = torch.empty(given.batch_size, channels, size_px, size_px, dtype=dtype)
    count = sum(parameter.numel() for parameter in model.parameters())
    case = Case(
        num_parameters=count,
        optimizer=given.optimizer,
        dtype=given.dtype,
        bucket_view=given.bucket_view,
        activations=saved_bytes(model, batch),
        batch_size=given.batch_size,
    )
    return case, f"{given.model} ({count:,} parameters) on {channels}x{size_px}x{size_px}"


def _memory_here() -> float:
    """That of this machine's first GPU."""
    import torch

    if not torch.cuda.is_available():
        raise TrainError(Exit.USAGE, "there is no GPU here to ask: give --memory, such as --memory 80GB")
    return float(torch.cuda.get_device_properties(0).total_memory)
