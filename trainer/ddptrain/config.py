"""The options of ddptrain, as groups of frozen dataclasses, and its command line.

Each field of a group is an option. Its type says how its text is parsed, and the text below it is its help. A value
comes from the flag, else from the environment, else from the recipe, else from the default. This module does not import
torch, so that ``--help`` is fast.
"""

import argparse
import ast
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from ddptrain.recipes import RECIPES, read_recipe, recipe_names
from ddpwire import commandline, names
from ddpwire.communication import AUTO, parse_way
from ddpwire.exits import Exit
from ddpwire.run_files import write_error

DATA = tuple(RECIPES)
MODELS = ("simple", "convnet", "imageclassifier", "resnet18", "digitsnet", "cifarnet", "cifarnet-deep")
TEXT_MODEL = "gpt"
SHARDED = ("fsdp", "hybrid")  # strategies
DEVICES = ("auto", "cuda", "cpu")

# The arguments of add_argument for a field of each type, unless the option overrides them.
_ARGUMENTS: dict[Any, dict[str, Any]] = {
    bool: {"action": argparse.BooleanOptionalAction},  # --name and --no-name
    int: {"metavar": "N"},
    float: {"metavar": "X"},
    Path: {"metavar": "DIR", "type": Path},
}


def option(default: Any = MISSING, *, shapes: bool = False, flag: str = "", alias: str = "", **argument: Any) -> Any:
    """Return a dataclass field for an option. ``argument`` is passed to argparse.

    ``flag`` is given only if it differs from the field's name. ``alias`` is an older flag. ``shapes`` states whether
    the option affects the weights. A checkpoint with another value of such an option cannot be resumed. If an option
    has no default, the recipe or the command line must set it.
    """
    return field(default=default, metadata={"shapes": shapes, "flag": flag, "alias": alias, "argument": argument})


shaping = partial(option, shapes=True)


def flag_of(item: Field[Any]) -> str:
    """Return the flag of a field."""
    return item.metadata["flag"] or "--" + item.name.replace("_", "-")


def key_of(item: Field[Any]) -> str:
    """Return the name of a field in checkpoints and in argparse. It is unique among all groups."""
    return flag_of(item).removeprefix("--").replace("-", "_")


def number(kind: type[int] | type[float], lowest: float, below: float = math.inf) -> Callable[[str], Any]:
    """Return an argparse type for numbers of at least ``lowest`` and less than ``below``."""

    def parse_number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not lowest <= value < below:
            upper = f" and less than {below:,}" if value >= below else ""
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a {'whole ' if kind is int else ''}number of at least {lowest:g}{upper}"
            )
        return value

    return parse_number


whole = partial(number, int, below=2**63)
real = partial(number, float)


def way(text: str) -> str:
    """Parse a way of communication."""
    try:
        return text if text == AUTO else str(parse_way(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def image_shape(text: str) -> tuple[int, int, int]:
    """Parse an image shape such as "3x32x32". Height and width are equal."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts) or parts[1] != parts[2]:
        raise argparse.ArgumentTypeError(f"{text!r} is not CHANNELSxSIZExSIZE, such as 3x32x32")
    return int(parts[0]), int(parts[1]), int(parts[2])


def increasing(text: str) -> tuple[int, ...]:
    """Parse increasing whole numbers that are separated by commas."""
    parts = text.split(",")
    values = tuple(int(part) for part in parts if part.isdecimal())
    if len(values) != len(parts) or list(values) != sorted(set(values)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of epochs such as 30,60,80")
    return values


def shares(text: str) -> str:
    """Check that the text is off, auto, or whole numbers such as 2:1."""
    if text not in ("off", "auto") and not re.fullmatch("[1-9][0-9]{0,5}(:[1-9][0-9]{0,5})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not off, auto, or one share for each rank such as 2:1")
    return text


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The data set, its folder, and how its images reach the model."""

    name: str = shaping("digits", flag="--data", choices=DATA)
    """data set: %(choices)s"""
    folder: Path = option(Path("data"), flag="--data-dir")
    """folder of the data, to which mnist, cifar10 and cifar100 are downloaded; for folder: contains CLASS/*.png or
    *.jpg, or the folders train and val with such folders; for text: a file, or a folder with *.txt"""
    image_size: Annotated[int, whole(1)] = shaping(224, metavar="PX")
    """for folder: side of the square images"""
    cache: Path | None = option(None, flag="--cache-dir")
    """for folder: where to cache decoded images, 3 bytes per pixel (default: .ddptrain in --data-dir)"""
    synthetic_samples: Annotated[int, whole(1)] = shaping(4096)
    """for synthetic: number of training images"""
    synthetic_shape: Annotated[tuple[int, int, int], image_shape] = shaping((1, 28, 28), metavar="CxHxW")
    """for synthetic: channels, height and width"""
    synthetic_classes: Annotated[int, whole(2)] = shaping(10)
    """for synthetic: number of classes"""
    context: Annotated[int, whole(1)] = shaping(256)
    """for text: context length in bytes"""
    input: Literal["auto", "device", "loader"] = option("auto")
    """device: keep all images in the device's memory; loader: load them with worker processes; auto: device if they
    fit, else loader. The order and the augmentation of the images are always the same"""
    workers: Annotated[int, whole(1)] = option(2)
    """worker processes per rank for --input loader"""


@dataclass(frozen=True, kw_only=True)
class AugmentationOptions:
    """The augmentation. Its random values depend only on the seed, the epoch and the sample."""

    augment: bool = shaping(True)
    """augment images with the options of this group"""
    shift: Annotated[int, whole(0)] | None = shaping(None, metavar="PX")
    """random crops after padding by PX black pixels (default: 1 for digits, 4 for cifar10 and cifar100, else 0)"""
    flip: bool | None = shaping(None)
    """mirror half of the images (default: yes for cifar10, cifar100 and folder)"""
    alternate_flip: bool = shaping(False)
    """mirror each image in every second epoch, instead of at random"""
    reflect: bool = shaping(False)
    """pad for --shift with the mirrored border of the image instead of black"""
    cutout: Annotated[int, whole(0)] = shaping(0, metavar="PX")
    """side of a gray square in each image; 0: none"""
    erase: Annotated[float, real(0, 1.001)] = shaping(0.0)
    """share of images of which a gray rectangle covers 2 to 33 %%"""
    mixup: Annotated[float, real(0)] = shaping(0.0)
    """blend each image with another one, with weights from Beta(X, X); 0: off"""
    cutmix: Annotated[float, real(0)] = shaping(0.0)
    """paste a rectangle of another image into each image, with its area from Beta(X, X); 0: off; with --mixup, each
    image gets one of the two"""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model and its initial weights."""

    name: str = shaping(flag="--model", metavar="NAME")
    """simple, convnet, imageclassifier, resnet18, digitsnet, cifarnet, cifarnet-deep, gpt for text, or a torchvision
    classifier: resnet50, torchvision:resnet18"""
    pretrained: str | None = option(None, nargs="?", const="imagenet", metavar="FILE")
    """start from torchvision's ImageNet weights, or from the weights in FILE, with a new head"""
    stem: Literal["auto", "small", "imagenet"] = shaping("auto")
    """first layers of a ResNet: imagenet reduces height and width to a quarter, small keeps them; auto: small for
    images up to 64 px, else imagenet"""
    norm: Literal["batch", "group"] = shaping("batch")
    """normalization of convnet and resnet18: over the batch, or over groups of channels of each image"""
    layers: Annotated[int, whole(1)] = shaping(4)
    """number of layers of gpt"""
    width: Annotated[int, whole(1)] = shaping(128)
    """width of gpt (embedding size)"""
    heads: Annotated[int, whole(1)] = shaping(4)
    """attention heads of gpt; must divide --width"""
    recompute: bool = option(False)
    """activation checkpointing: recompute activations in the backward pass to save memory"""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The length of the training, its batches, its loss and its evaluation."""

    epochs: Annotated[int, whole(0)] = option()
    """number of epochs; 0: only evaluate the checkpoint"""
    batch_size: Annotated[int, whole(1)] = shaping()
    """images per optimizer step over ALL ranks"""
    batch_size_per_rank: Annotated[int, whole(0)] = option(0)
    """images per optimizer step on each rank, instead of --batch-size; 0: use --batch-size"""
    accumulate: Annotated[int, whole(1)] = shaping(1)
    """split a step's images into N parts, and add up their gradients, to save memory"""
    label_smoothing: Annotated[float, real(0, 1)] = shaping(0.0)
    """label smoothing, from 0 (none) to less than 1"""
    ema: Annotated[float, real(0, 1)] = shaping(0.0)
    """evaluate an exponential moving average of the weights with this decay per step, such as 0.999; 0: off"""
    test_flip: bool = option(False)
    """evaluate the mean of each image and its mirror image"""
    test_shift: Annotated[int, whole(0)] = option(0, metavar="PX")
    """evaluate the mean of each image and of the image moved by PX pixels to the top left and to the bottom right"""
    tensorboard: Path | None = option(None)
    """write TensorBoard scalars of each epoch to this folder"""
    seed: Annotated[int, whole(0)] = shaping(0)
    """random seed of the initial weights, the order of the data and the augmentation"""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer and its learning rate."""

    name: Literal["sgd", "adamw", "muon"] = shaping("sgd", flag="--optimizer")
    """SGD with Nesterov momentum, AdamW, or for cifarnet and cifarnet-deep Muon, with SGD for head and biases"""
    lr: Annotated[float, real(0.0)] = shaping()
    """peak learning rate"""
    sgd_lr: Annotated[float, real(0.0)] = shaping(1.0)
    """with muon: factor of the learning rate of SGD"""
    bias_lr: Annotated[float, real(0.0)] = shaping(0.0)
    """factor of the learning rate of normalization layers and biases, whose weight decay is then divided by it; 0: no
    factor, and no weight decay"""
    scale_lr: bool = shaping(False)
    """multiply --lr by the number of ranks, with a warm-up from --lr"""
    schedule: Literal["one-cycle", "cosine", "linear", "steps", "constant"] = shaping("one-cycle")
    """learning rate schedule: one-cycle rises for 30 %% of the steps and falls to 0; cosine and linear fall to 0;
    steps multiplies by --gamma at each of --milestones"""
    warmup: Annotated[float, real(0.0)] | None = shaping(None)
    """warm-up epochs of all schedules but one-cycle (default: 0; with --scale-lr 5, at most a quarter of --epochs)"""
    milestones: Annotated[tuple[int, ...], increasing] = shaping((30, 60, 80), metavar="N,N,...")
    """epochs after which the learning rate is multiplied by --gamma"""
    gamma: Annotated[float, real(0.0)] = shaping(0.1)
    """factor of the learning rate at each of --milestones"""
    momentum: Annotated[float, real(0, 1)] = shaping(0.9)
    """momentum of SGD, or the first beta of AdamW; that of Muon is 0.6"""
    weight_decay: Annotated[float, real(0.0)] = shaping(0.0)
    """weight decay, not applied to normalization layers, biases and weights that Muon trains; 0: none"""
    clip: Annotated[float, real(0.0)] = shaping(0.0)
    """clip the norm of the gradient to this value; 0: off"""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Where and when checkpoints are saved, and from which one to resume."""

    folder: Path = option(Path("checkpoints"), flag="--checkpoint-dir", type=str)
    """folder to which rank 0 writes the checkpoints; a URL is used as --checkpoint-store"""
    store: str = option("", flag="--checkpoint-store", metavar="URL")
    """object store, such as s3://BUCKET/PATH, to which each checkpoint is copied; a training resumes from it if the
    folder has no newer checkpoint; needs ddpctl[s3]"""
    every: Annotated[int, whole(0)] = option(0, flag="--checkpoint-every")
    """also save every N steps; 0: only at the end of each epoch and when the training is stopped"""
    minutes: Annotated[float, real(0.0)] = option(0.0, flag="--checkpoint-minutes", metavar="T")
    """also save when the last checkpoint is T minutes old; 0: off"""
    keep: Annotated[int, whole(0)] = option(3)
    """number of newest checkpoints to keep; 0: all"""
    keep_best: bool = option(True)
    """also keep the checkpoint with the highest test accuracy"""
    resume: str = option("auto", metavar="auto|never|PATH")
    """auto: continue from the newest complete checkpoint, if there is one; never: start at step 0, and fail if the
    folder has checkpoints; PATH: continue from this checkpoint"""
    allow_changed: bool = option(False, flag="--allow-changed-config")
    """continue even if options that affect the weights have changed"""


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The device and the precision."""

    device: str = option("auto", choices=DEVICES)
    """%(choices)s"""
    precision: str = option("auto", choices=("auto", "fp32", "bf16", "fp16", "fp64"))
    """precision of matrix products; auto: bf16 if the hardware supports it, else fp16 on a GPU and fp32 on a CPU; with
    --deterministic fp32. fp64 is for comparisons"""
    channels_last: bool = option(True)
    """use the memory format channels_last"""
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = option("off")
    """mode of torch.compile, which delays the first step; reduce-overhead uses CUDA graphs"""
    deterministic: bool = option(False)
    """one thread per rank and deterministic algorithms: the same seed and number of ranks give bit-identical weights,
    also after a restart"""


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The rendezvous and the strategy. Under ddprun and torchrun, no option for the rendezvous is needed."""

    rank: Annotated[int, whole(0)] | None = option(None)
    """rank of this process, if no launcher sets RANK"""
    world_size: Annotated[int, whole(1)] | None = option(None)
    """number of ranks, if no launcher sets WORLD_SIZE"""
    init_method: str = option("env://", metavar="URL")
    """rendezvous of the ranks: env:// (MASTER_ADDR and MASTER_PORT), tcp://HOST:PORT, or file:///PATH of a new file
    that all ranks can access"""
    spawn: Annotated[int, whole(1, below=1025)] = option(1)
    """start N ranks on this machine with torch.multiprocessing"""
    timeout_s: Annotated[int, whole(1, below=100_000_001)] = option(300, flag="--timeout", metavar="SECONDS")
    """time-out of the rendezvous, of the download of data by another rank, and of collectives"""
    strategy: str = option("ddp", choices=("ddp", *SHARDED, "dp", "single"))
    """ddp: DistributedDataParallel; fsdp: parameters, gradients and optimizer state sharded over all ranks; hybrid:
    sharded over the ranks of a node; dp: DataParallel, one process for all GPUs, for comparison; single: one device"""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = option("auto")
    """communication backend; auto: nccl on GPUs, gloo on CPUs"""
    balance: Annotated[str, shares] = option("off", metavar="off|auto|N:N:...")
    """each rank's share of a batch. off: equal; auto: after each epoch, proportional to the ranks' measured speeds; N:N
    one number for each rank. Gradients are exact for any shares"""
    sync_bn: bool = shaping(False)
    """synchronize batch normalization over all ranks (GPUs only)"""
    communication: Annotated[str, way] = shaping("plain", metavar="WAY", alias="--compress")
    """how ranks exchange gradients or weights: plain, bf16, fp16, powersgd:RANK, localsgd:STEPS, diloco:STEPS, or auto,
    which chooses from the first steps"""
    bucket_mb: Annotated[float, real(0.01)] = option(25.0, metavar="MB")
    """size of DDP's gradient buckets"""
    bucket_view: bool = option(True)
    """make the gradients views of the buckets, which saves a copy"""
    static_graph: bool = option(False)
    """DDP's static_graph: every step uses the same parameters in the same order"""


@dataclass(frozen=True, kw_only=True)
class CallbackOptions:
    """Profiling, debugging, and a limit on the duration."""

    profile: Annotated[int, whole(0)] = option(0)
    """trace N steps of every rank, for https://ui.perfetto.dev; 0: none"""
    profile_dir: Path = option(Path("profile"))
    """folder of the traces"""
    debug: bool = option(False)
    """debug mode, which is slow: more output of torch, a record of the last collectives, anomaly detection in the
    backward pass"""
    stop_after: Annotated[float, real(0.0)] = option(0.0, metavar="T")
    """save a checkpoint and exit with 143 after T minutes; 0: never. ddprun --deadline does this for any script"""


EPILOG = """\
Examples:
  ddptrain                                        train on digits in one process
  ddptrain --spawn 2                              the same with two ranks on this machine
  torchrun --nproc-per-node 2 -m ddptrain         the same, started by torchrun
  ddprun --nproc-per-node 2 -m ddptrain --recipe mnist-simple --epochs 3
  ddptrain --recipe folder-resnet18-pretrained --data-dir photos
  ddptrain --profile 5                            trace five steps, for https://ui.perfetto.dev
  ddptrain export checkpoints weights.pt          write the weights to a file
  ddptrain --data text --data-dir corpus.txt --layers 6 --width 256 --context 256
  ddptrain fit --params 8e9 --memory 80GB         estimate whether it fits into a GPU

Stopping: after SIGTERM, SIGUSR1 or SIGUSR2 to any rank, ddptrain saves a checkpoint at the end of the step, and exits
with 143, 138 or 140. After Ctrl-C it exits with 130; when its terminal closes, with 143. The same command continues
from the checkpoint. The final weights equal those of an uninterrupted training: bit for bit with --deterministic,
otherwise up to rounding.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one training, including the recipe's values."""

    data: DataOptions
    augmentation: AugmentationOptions
    model: ModelOptions
    training: TrainingOptions
    optimizer: OptimizerOptions
    checkpoints: CheckpointOptions
    machine: MachineOptions
    ranks: RankOptions
    callbacks: CallbackOptions


GROUPS: dict[str, Any] = get_type_hints(Options)  # the dataclass of each group, keyed by the name of the group
# Options that the environment may give.
_VARIABLES = {
    "device": names.DEVICE,
    "checkpoint_dir": names.CHECKPOINT_DIR,
    "checkpoint_store": names.CHECKPOINT_STORE,
}


class Parser(commandline.Parser):
    """A parser of command lines. On all ranks except rank 0, it is ``quiet``, so it prints no errors."""

    quiet = False
    source = ""  # the prefix of an error if the arguments are those of a recipe

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def format_help(self) -> str:
        """Return the help, with the documentation of the fields."""
        texts = _documentation()
        for action in self._actions:
            action.help = action.help or texts.get(action.dest)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Print the message unless ``quiet`` is set, and exit with code 2."""
        write_error(f"{self.prog}: {self.with_suggestion(message)}", os.environ)
        if self.quiet:
            self.exit(Exit.USAGE)
        super().error(message)

    def with_suggestion(self, message: str) -> str:
        """Return ``message`` with the prefix ``source`` and, if there is one, a suggestion."""
        return self.source + super().with_suggestion(message)


def parse_options(arguments: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Return the options of a command line. Exits with code 2 if it is invalid."""
    parser = _parser(quiet=environ.get(names.RANK, "0") != "0")
    given = vars(parser.parse_args(arguments))
    if "batch_size" in given and given.get("batch_size_per_rank"):
        parser.error("--batch-size and --batch-size-per-rank exclude each other: give only one of them")
    given_ranks = [flag for flag in ("rank", "world_size", "init_method") if flag in given]
    if given.get("spawn", 1) > 1 and given_ranks:
        parser.error(f"--spawn numbers its ranks itself: leave out --{given_ranks[0].replace('_', '-')}")
    name = given.pop("recipe", None) or RECIPES[given.get("data", "digits")]
    if "://" in given.get("checkpoint_dir", ""):
        given["checkpoint_store"] = given.pop("checkpoint_dir")
    try:
        recipe = read_recipe(name)
    except ValueError as error:
        parser.error(f"argument --recipe: {error}")
    parser.source = f"recipe {name}: "
    values = vars(parser.parse_args(recipe))
    parser.source = ""
    values |= {key: environ[variable] for key, variable in _VARIABLES.items() if environ.get(variable)}
    if values.get("device", "auto") not in DEVICES:
        parser.error(f"{names.DEVICE}={values['device']!r} is not auto, cuda or cpu")
    values |= given
    if "checkpoint_dir" in values:
        values["checkpoint_dir"] = Path(values["checkpoint_dir"])
    required = [item for kind in GROUPS.values() for item in fields(kind) if item.default is MISSING]
    if missing := sorted(flag_of(item) for item in required if key_of(item) not in values):
        parser.error(f"recipe {name} has no value for {', '.join(missing)}")
    return Options(
        **{
            group: kind(**{item.name: values[key_of(item)] for item in fields(kind) if key_of(item) in values})
            for group, kind in GROUPS.items()
        }
    )


def shaping_options(options: Options, *, batch_size: int) -> dict[str, Any]:
    """Return the options that affect the weights, keyed by name. A resumed training must have the same values.

    ``batch_size`` is the batch size of all ranks together. The number of epochs is left out, so that a training can be
    extended. Options that change the rounding are included only if ``--deterministic`` is given. torch.load can read
    all values with weights_only=True.
    """
    groups = [getattr(options, name) for name in GROUPS]
    shaping = ((group, item) for group in groups for item in fields(group) if item.metadata["shapes"])
    values = {key_of(item): getattr(group, item.name) for group, item in shaping}
    machine = options.machine
    if machine.deterministic:
        precision = "fp32" if machine.precision == "auto" else machine.precision
        values |= {"precision": precision, "channels_last": machine.channels_last, "compile": machine.compile}
        values |= {"bucket_mb": options.ranks.bucket_mb, "strategy": options.ranks.strategy}
        values |= {"balance": options.ranks.balance}
    return values | {"batch_size": batch_size, "deterministic": machine.deterministic}


def _parser(*, quiet: bool) -> Parser:
    parser = Parser(
        prog="ddptrain",
        usage="ddptrain [OPTIONS]\n       ddptrain export SOURCE TARGET\n       ddptrain fit [OPTIONS]\n"
        "       ddptrain sample SOURCE",
        description="Train an image classifier or a GPT, as one rank of a launcher or as a single process.",
        epilog=EPILOG,
        argument_default=argparse.SUPPRESS,
    )
    parser.quiet = quiet
    parser.add_argument(
        "--recipe",
        help=f"defaults of the options below: {', '.join(recipe_names())}, or a YAML file (default: depends on --data)",
        metavar="NAME",
    )
    for name, kind in GROUPS.items():
        arguments = parser.add_argument_group("profiling and debugging" if name == "callbacks" else name)
        for item in fields(kind):
            given: dict[str, Any] = {"dest": key_of(item), "default": argparse.SUPPRESS, **_argument(item)}
            alias = item.metadata["alias"]
            group = arguments.add_mutually_exclusive_group() if alias else arguments
            group.add_argument(flag_of(item), **given)
            if alias:
                group.add_argument(alias, **given, help=f"the old name of {flag_of(item)}")
    return parser


def _argument(item: Field[Any]) -> dict[str, Any]:
    is_optional = get_origin(item.type) in (Union, UnionType)
    hint = next(part for part in get_args(item.type) if part is not NoneType) if is_optional else item.type
    base, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    choices = {"choices": get_args(base)} if get_origin(base) is Literal else {}
    parse = {"type": notes[0]} if notes else {}
    return {**_ARGUMENTS.get(base, {}), **choices, **parse, **item.metadata["argument"]}


def _documentation() -> dict[str, str]:
    """Return the help of each option: the text below its field in this file, and its default."""
    module = ast.parse(Path(__file__).read_bytes())
    texts: dict[tuple[str, str], str] = {}
    for kind in (node for node in module.body if isinstance(node, ast.ClassDef)):
        for line, below in pairwise(kind.body):
            if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[kind.name, ast.unparse(line.target)] = " ".join(str(ast.literal_eval(below.value)).split())
    items = ((kind, item) for kind in GROUPS.values() for item in fields(kind))
    return {key_of(item): texts[kind.__name__, item.name] + _default_text(item) for kind, item in items}


def _default_text(item: Field[Any]) -> str:
    key, default = key_of(item), item.default
    if default is MISSING:
        return " (default: from the recipe)"
    if default is None:
        return ""  # the help itself explains the default
    if isinstance(default, bool):
        return " (default)" if default else ""
    if isinstance(default, tuple):
        default = ("x" if key.endswith("shape") else ",").join(str(part) for part in default)
    return f" (default: {f'${_VARIABLES[key]}, else ' if key in _VARIABLES else ''}{default or 'none'})"
