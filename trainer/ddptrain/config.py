"""The options of ddptrain, as groups of frozen dataclasses, and its command line.

Each field of a group has a flag, a help text, a type and a default. It also states whether it shapes the weights. A
value comes from the flag, otherwise from the environment, otherwise from the recipe, otherwise from the default. This
module does not import torch, so that ``--help`` is fast.
"""

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_type_hints

from ddptrain.recipes import RECIPES, Recipe, RecipeError, read_recipe, recipe_names
from ddpwire import commandline, names
from ddpwire.exits import Exit
from ddpwire.run_files import write_error

DATA = tuple(RECIPES)
MODELS = ("simple", "convnet", "imageclassifier", "resnet18", "digitsnet")
TEXT_MODEL = "gpt"
SHARDED = ("fsdp", "hybrid")  # strategies
SCHEDULES = ("one-cycle", "cosine", "steps", "constant")
DEVICES = ("auto", "cuda", "cpu")
COMPILE = ("off", "default", "reduce-overhead", "max-autotune")


# The arguments of add_argument for a field of each type, unless the option overrides them.
_ARGUMENTS: dict[Any, dict[str, Any]] = {
    bool: {"action": argparse.BooleanOptionalAction},  # --name and --no-name
    int: {"metavar": "N"},
    float: {"metavar": "X"},
    Path: {"metavar": "DIR", "type": Path},
}


def option(text: str, *, shapes: bool = False, flag: str = "", default: Any = MISSING, **argument: Any) -> Any:
    """Return a dataclass field for an option. ``flag`` is set if it differs from the field's name.

    ``shapes``: whether the option shapes the weights, so that a checkpoint with another value cannot be resumed.
    Without a default, the value comes from the recipe. ``argument`` is passed to argparse.
    """
    return field(default=default, metadata={"shapes": shapes, "flag": flag, "argument": {"help": text, **argument}})


def shaping(text: str, **rest: Any) -> Any:
    """Return the field of an option that shapes the weights; see `option`."""
    return option(text, shapes=True, **rest)


def flag_of(item: Field[Any]) -> str:
    """Return the flag of a field."""
    return item.metadata["flag"] or "--" + item.name.replace("_", "-")


def key_of(item: Field[Any]) -> str:
    """Return a name of the field that is unique among all groups. It is used in checkpoints and by argparse."""
    return flag_of(item).removeprefix("--").replace("-", "_")


def whole(lowest: int, highest: int = 2**63 - 1) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from ``lowest`` to ``highest`` (default: the largest int64)."""

    def parse_whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if not lowest <= value <= highest:
            limits = f"from {lowest} to {highest}" if value > highest else f"of at least {lowest}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {limits}")
        return value

    return parse_whole


def real(lowest: float, below: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type for numbers of at least ``lowest`` and less than ``below``."""

    def parse_real(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not lowest <= value < below:
            upper = "" if below == math.inf else f" and below {below:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {lowest:g}{upper}")
        return value

    return parse_real


def image_shape(text: str) -> tuple[int, int, int]:
    """Parse an image shape CxHxW with H = W."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts) or parts[1] != parts[2]:
        raise argparse.ArgumentTypeError(f"{text!r} is not CHANNELSxSIZExSIZE, such as 3x32x32")
    return int(parts[0]), int(parts[1]), int(parts[2])


def milestones(text: str) -> tuple[int, ...]:
    """Parse increasing whole numbers, separated by commas."""
    parts = text.split(",")
    values = tuple(int(part) for part in parts if part.isdecimal())
    if len(values) != len(parts) or list(values) != sorted(set(values)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of epochs such as 30,60,80")
    return values


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The data set, its location, and how its images reach the model."""

    name: str = shaping("data set: %(choices)s", flag="--data", default="digits", choices=DATA)
    folder: Path = option(
        "where mnist, cifar10 and cifar100 are read, and downloaded to if they are not there; for folder: holds "
        "CLASS/*.png or *.jpg, or these under train and val; for text: a file, or a folder of *.txt",
        flag="--data-dir",
        default=Path("data"),
    )
    image_size: int = shaping(
        "for folder: images are cut to squares of so many pixels", type=whole(1), default=224, metavar="PX"
    )
    cache: Path | None = option(
        "for folder: where decoded images are kept, 3 bytes per pixel (default: .ddptrain in --data-dir)",
        flag="--cache-dir",
        default=None,
    )
    synthetic_samples: int = shaping("training images of the synthetic data", type=whole(1), default=4096)
    synthetic_shape: tuple[int, int, int] = shaping(
        "their channels, height and width", type=image_shape, default=(1, 28, 28), metavar="CxHxW"
    )
    synthetic_classes: int = shaping("their classes", type=whole(2), default=10)
    context: int = shaping("for text: bytes that the model sees at once", type=whole(1), default=256)
    input: str = option(
        "device: all images on the device as bytes; loader: read by worker processes; auto: on the device where they "
        "fit. The order and the augmentation are the same",
        choices=("auto", "device", "loader"),
        default="auto",
    )
    workers: int = option("of the loader, per rank", type=whole(1), default=2)


@dataclass(frozen=True, kw_only=True)
class AugmentationOptions:
    """The augmentation. Its results depend only on the seed, the epoch and the sample, not on the number of ranks."""

    augment: bool = shaping("the changes of this group, or none", default=True)
    shift: int | None = shaping(
        "crops of images padded by so many black pixels (default: the data set's: digits 1, cifar10 and cifar100 4)",
        type=whole(0),
        default=None,
        metavar="PX",
    )
    flip: bool | None = shaping(
        "mirror half of them (default: the data set's: cifar10, cifar100, folder)", default=None
    )
    cutout: int = shaping("a grey square of this side in each; 0: none", type=whole(0), default=0, metavar="PX")
    erase: float = shaping(
        "share of images with a grey rectangle of 2 to 33 %% of their area", type=real(0, 1.001), default=0.0
    )
    mixup: float = shaping("blend each with another one, by Beta(X, X); 0: not", type=real(0), default=0.0)
    cutmix: float = shaping(
        "paste a rectangle of another one into each, by Beta(X, X); 0: not; with --mixup: one or the other",
        type=real(0),
        default=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model and its initial weights."""

    name: str = shaping(
        f"{', '.join(MODELS)}, {TEXT_MODEL} for text, or a classifier of torchvision: resnet50, torchvision:resnet18",
        flag="--model",
        metavar="NAME",
    )
    pretrained: str | None = option(
        "start from torchvision's ImageNet weights, or from those in a file, with a new head",
        nargs="?",
        const="imagenet",
        default=None,
        metavar="FILE",
    )
    stem: str = shaping(
        "first layer of a ResNet: imagenet's shrinks images to a quarter, small not at all; auto: small up to 64 px",
        choices=("auto", "small", "imagenet"),
        default="auto",
    )
    norm: str = shaping(
        "of convnet and resnet18; group: an image is seen alone, whatever the batch",
        choices=("batch", "group"),
        default="batch",
    )
    layers: int = shaping("of gpt", type=whole(1), default=4)
    width: int = shaping("of gpt: numbers a position", type=whole(1), default=128)
    heads: int = shaping("of gpt's attention; they divide --width", type=whole(1), default=4)
    recompute: bool = option("keep fewer activations and compute them again in the backward pass", default=False)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The length of the training, its batches, its loss and its evaluation."""

    epochs: int = option("times through the training images; 0: only evaluate the checkpoint", type=whole(0))
    batch_size: int = shaping("images per optimizer step, over ALL ranks together", type=whole(1))
    batch_size_per_rank: int = option(
        "images per step on each rank, in place of --batch-size; 0: --batch-size holds", type=whole(0), default=0
    )
    accumulate: int = shaping(
        "parts that a rank takes its images of a step in, one after the other: less memory, the same gradient",
        type=whole(1),
        default=1,
    )
    label_smoothing: float = shaping("0 to under 1; 0: none", type=real(0, 1), default=0.0)
    ema: float = shaping(
        "evaluate a moving average of the weights that keeps this share a step, such as 0.999; 0: the weights",
        type=real(0, 1),
        default=0.0,
    )
    test_flip: bool = option("evaluate each image and its mirror image together", default=False)
    tensorboard: Path | None = option("write scalars of each epoch there", default=None)
    seed: int = shaping("of the weights, the order and the augmentation", type=whole(0), default=0)


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer and its learning rate."""

    name: str = shaping(
        "SGD with Nesterov momentum, or AdamW", flag="--optimizer", choices=("sgd", "adamw"), default="sgd"
    )
    lr: float = shaping("peak learning rate", type=real(0.0))
    scale_lr: bool = shaping("multiply --lr by the number of ranks, after a warm-up from --lr", default=False)
    schedule: str = shaping(
        "of the learning rate: one-cycle goes up for 30 %% of the steps and down to 0, cosine down to 0, steps down by "
        "--gamma at the --milestones",
        choices=SCHEDULES,
        default="one-cycle",
    )
    warmup: float | None = shaping(
        "epochs in which cosine, steps and constant go up to the peak (default: 0; with --scale-lr 5, or a quarter of "
        "the epochs where that is less)",
        type=real(0.0),
        default=None,
    )
    milestones: tuple[int, ...] = shaping(
        "epochs after which the rate is multiplied by --gamma", type=milestones, default=(30, 60, 80), metavar="N,N,..."
    )
    gamma: float = shaping("see --milestones", type=real(0.0), default=0.1)
    momentum: float = shaping("0 to under 1; 0: plain SGD; AdamW's first beta", type=real(0, 1), default=0.9)
    weight_decay: float = shaping("of the weights, not of norms and biases; 0: none", type=real(0.0), default=0.0)
    clip: float = shaping(
        "longest gradient, as a norm; a longer one is shortened; 0: none", type=real(0.0), default=0.0
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Where and when checkpoints are saved, and from which one to resume."""

    folder: Path = option(
        "where they are kept; rank 0 writes them. A URL is taken as --checkpoint-store",
        flag="--checkpoint-dir",
        type=str,
        default=Path("checkpoints"),
    )
    store: str = option(
        "an object store, such as s3://BUCKET/PATH, that gets a copy of each; a start without newer ones continues "
        "from it; needs ddpctl[s3]",
        flag="--checkpoint-store",
        default="",
        metavar="URL",
    )
    every: int = option(
        "also save every N steps; 0: only at the end of an epoch and when a signal asks to stop",
        flag="--checkpoint-every",
        type=whole(0),
        default=0,
    )
    minutes: float = option(
        "also save when the last one is T minutes old; 0: never for that",
        flag="--checkpoint-minutes",
        type=real(0.0),
        default=0.0,
        metavar="T",
    )
    keep: int = option("newest checkpoints to keep; 0: all", type=whole(0), default=3)
    keep_best: bool = option("keep the one of the highest test accuracy too", default=True)
    resume: str = option(
        "auto: continue from the newest whole one; never: start at step 0, in a folder without any; PATH: from it",
        default="auto",
        metavar="auto|never|PATH",
    )
    allow_changed: bool = option(
        "continue though options that shape the weights have changed", flag="--allow-changed-config", default=False
    )


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The device and the precision."""

    device: str = option("%(choices)s", choices=DEVICES, default="auto")
    precision: str = option(
        "of the matrix products; auto: bf16 where the hardware has it, else fp16 on a GPU and fp32 on a CPU; fp32 with "
        "--deterministic; fp64 is for comparing runs",
        choices=("auto", "fp32", "bf16", "fp16", "fp64"),
        default="auto",
    )
    channels_last: bool = option("keep images and features with their channels together", default=True)
    compile: str = option(
        "torch.compile, which takes a while before the first step; reduce-overhead: with CUDA graphs",
        choices=COMPILE,
        default="off",
    )
    deterministic: bool = option(
        "one thread per rank, fixed algorithms, sums in a fixed order: the same seed and number of ranks give the same "
        "weights bit for bit, also after a restart",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """How the ranks meet, and DDP. ddprun and torchrun set the variables of a rank, so no option is needed there."""

    rank: int | None = option("this process's, where no launcher says it", type=whole(0), default=None)
    world_size: int | None = option("ranks, where no launcher says it", type=whole(1), default=None)
    init_method: str = option(
        "where the ranks meet: env:// (MASTER_ADDR and MASTER_PORT), tcp://HOST:PORT, file:///PATH of a new file that "
        "all ranks see",
        default="env://",
        metavar="URL",
    )
    spawn: int = option(
        "start so many ranks on this machine, with torch.multiprocessing", type=whole(1, 1024), default=1
    )
    timeout_s: int = option(
        "longest wait for the other ranks: to come, to download data, to answer",
        flag="--timeout",
        type=whole(1, 100_000_000),
        default=300,
        metavar="SECONDS",
    )
    strategy: str = option(
        "ddp: DistributedDataParallel; fsdp: weights, gradients and moments in shards over all ranks; hybrid: over the "
        "ranks of a node; dp: DataParallel, one process for all GPUs, to compare with; single: one device",
        choices=("ddp", *SHARDED, "dp", "single"),
        default="ddp",
    )
    backend: str = option(
        "carries the gradients; auto: nccl on GPUs, gloo on CPUs",
        choices=("auto", "nccl", "gloo", "mpi"),
        default="auto",
    )
    sync_bn: bool = shaping("batch norms over all ranks' images (GPUs only)", default=False)
    compress: str = shaping("what gradients travel as", choices=("none", "bf16", "fp16"), default="none")
    bucket_mb: float = option("gradients that travel together", type=real(0.01), default=25.0, metavar="MB")
    bucket_view: bool = option("gradients are views of the buckets: a copy less", default=True)
    static_graph: bool = option("promise DDP that every step uses the same parameters in the same order", default=False)


@dataclass(frozen=True, kw_only=True)
class CallbackOptions:
    """Profiling, debugging, and a limit on the duration."""

    profile: int = option("trace N steps of every rank, for https://ui.perfetto.dev; 0: none", type=whole(0), default=0)
    profile_dir: Path = option("where the traces go", default=Path("profile"))
    debug: bool = option(
        "have torch tell more, record the last collectives and show where a failed gradient came from; slow",
        default=False,
    )
    stop_after: float = option(
        "save and stop with exit code 143 after T minutes; 0: never. ddprun's --deadline does so for any script",
        type=real(0.0),
        default=0.0,
        metavar="T",
    )


EPILOG = """\
Examples:
  ddptrain                                        digits, one process
  ddptrain --spawn 2                              the same on two ranks of this machine
  torchrun --nproc-per-node 2 -m ddptrain         the same, started by torchrun
  ddprun --nproc-per-node 2 -m ddptrain --recipe mnist-simple --epochs 3
  ddptrain --recipe folder-resnet18-pretrained --data-dir photos
  ddptrain --profile 5                            a trace of five steps, for https://ui.perfetto.dev
  ddptrain export checkpoints weights.pt          the weights alone; ddptrain export --help
  ddptrain --data text --data-dir corpus.txt --layers 6 --width 256 --context 256
  ddptrain fit --params 8e9 --memory 80GB         does it fit into the GPU? ddptrain fit --help

Stopping: SIGTERM and SIGUSR1, on any rank, save a checkpoint after the running step and exit with 143 and 138;
Ctrl-C does so with 130, a terminal that is closed with 143. The same command continues from
there. The weights are those of a training that never stopped, up to rounding; with
--deterministic bit for bit.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one training, including the recipe's values. Each group is annotated with its title in --help."""

    data: Annotated[DataOptions, "what is trained on"]
    augmentation: Annotated[AugmentationOptions, "how images are changed"]
    model: Annotated[ModelOptions, "what is trained"]
    training: Annotated[TrainingOptions, "how"]
    optimizer: Annotated[OptimizerOptions, "how a gradient becomes a step"]
    checkpoints: Annotated[CheckpointOptions, "checkpoints"]
    machine: Annotated[MachineOptions, "the machine"]
    ranks: Annotated[RankOptions, "the ranks"]
    callbacks: Annotated[CallbackOptions, "what is seen of it"]


GROUPS: dict[str, Any] = get_type_hints(Options)
TITLES = {name: hint.__metadata__[0] for name, hint in get_type_hints(Options, include_extras=True).items()}
# Options that the environment may give.
_VARIABLES = {
    "device": names.DEVICE,
    "checkpoint_dir": names.CHECKPOINT_DIR,
    "checkpoint_store": names.CHECKPOINT_STORE,
}


class Parser(commandline.Parser):
    """A parser that prints errors only on one rank."""

    quiet = False
    source = ""  # a prefix of errors, when the arguments are not from the command line

    def error(self, message: str) -> NoReturn:
        """Print the message, unless ``quiet``, and exit with code 2."""
        write_error(f"{self.prog}: {self.with_suggestion(message)}", os.environ)
        if self.quiet:
            self.exit(Exit.USAGE)
        super().error(message)

    def with_suggestion(self, message: str) -> str:
        """Return ``message`` with the prefix ``source``, and with a suggestion if there is one."""
        return self.source + super().with_suggestion(message)


def parse_options(arguments: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Return the options of a command line. Exit with code 2 if it is wrong."""
    parser = _parser(quiet=environ.get(names.RANK, "0") != "0")
    given = vars(parser.parse_args(arguments))
    if "batch_size" in given and given.get("batch_size_per_rank"):
        parser.error("--batch-size and --batch-size-per-rank set the same value: give only one of them")
    given_ranks = [flag for flag in ("rank", "world_size", "init_method") if flag in given]
    if given.get("spawn", 1) > 1 and given_ranks:
        parser.error(f"--spawn starts its ranks by itself: leave out --{given_ranks[0].replace('_', '-')}")
    name = given.pop("recipe", None) or RECIPES[given.get("data", "digits")]
    if "://" in given.get("checkpoint_dir", ""):
        given["checkpoint_store"] = given.pop("checkpoint_dir")
    values = _recipe_values(name, parser) | _environment_values(environ, parser) | given
    if "checkpoint_dir" in values:
        values["checkpoint_dir"] = Path(values["checkpoint_dir"])
    required = [flag_of(item) for kind in GROUPS.values() for item in fields(kind) if item.default is MISSING]
    if missing := sorted(flag for flag in required if flag.removeprefix("--").replace("-", "_") not in values):
        names_of_missing = " and ".join([", ".join(missing[:-1]), missing[-1]] if missing[1:] else missing)
        parser.error(f"recipe {name}: {names_of_missing} {'are' if missing[1:] else 'is'} not given")
    return Options(**{group: _group(kind, values) for group, kind in GROUPS.items()})


def _recipe_values(name: str, parser: Parser) -> dict[str, Any]:
    try:
        recipe: Recipe = read_recipe(name)
    except RecipeError as error:
        parser.error(f"argument --recipe: {error}")
    parser.source = f"recipe {name}: "
    values = vars(parser.parse_args(recipe.arguments))
    parser.source = ""
    return values


def shaping_options(options: Options, *, batch_size: int) -> dict[str, Any]:
    """Return the options that shape the weights, which a resumed training must share.

    The values have types that torch.load can read. ``batch_size`` is over all ranks. The number of epochs is not
    included, so that a training can be extended. With ``--deterministic``, options that change the rounding are
    included.
    """
    groups = [getattr(options, name) for name in GROUPS]
    shaping = ((one, item) for one in groups for item in fields(one) if item.metadata["shapes"])
    values = {key_of(item): getattr(one, item.name) for one, item in shaping}
    machine = options.machine
    if machine.deterministic:
        precision = "fp32" if machine.precision == "auto" else machine.precision
        values |= {"precision": precision, "channels_last": machine.channels_last, "compile": machine.compile}
        values |= {"bucket_mb": options.ranks.bucket_mb, "strategy": options.ranks.strategy}
    return values | {"batch_size": batch_size, "deterministic": machine.deterministic}


def _group(kind: Any, values: Mapping[str, Any]) -> Any:
    return kind(**{item.name: values[key_of(item)] for item in fields(kind) if key_of(item) in values})


def _environment_values(environ: Mapping[str, str], parser: Parser) -> dict[str, Any]:
    values: dict[str, Any] = {key: environ[name] for key, name in _VARIABLES.items() if environ.get(name)}
    if values.get("device", "auto") not in DEVICES:
        parser.error(f"{names.DEVICE}={values['device']!r} is not auto, cuda or cpu")
    return values


def _parser(*, quiet: bool) -> Parser:
    parser = Parser(
        prog="ddptrain",
        usage="ddptrain [OPTIONS]\n       ddptrain export SOURCE TARGET\n       ddptrain fit [OPTIONS]\n"
        "       ddptrain sample SOURCE",
        description="Train an image classifier or a GPT: one rank of it, or all in one process.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.quiet = quiet
    parser.add_argument(
        "--recipe",
        help=f"defaults for what follows: {', '.join(recipe_names())}, or a YAML file (default: the data set's)",
        metavar="NAME",
    )
    for name, kind in GROUPS.items():
        arguments = parser.add_argument_group(TITLES[name])
        for one in fields(kind):
            base = (*get_args(one.type), one.type)[0]  # the type without "or None"
            argument = _ARGUMENTS.get(base, {}) | one.metadata["argument"]
            argument["help"] += _default_text(one)
            arguments.add_argument(flag_of(one), dest=key_of(one), default=argparse.SUPPRESS, **argument)
    return parser


def _default_text(item: Field[Any]) -> str:
    key, default = key_of(item), item.default
    if default is MISSING:
        return " (default: the recipe's)"
    if default is None:
        return ""  # the help itself explains the default
    if isinstance(default, bool):
        return " (default)" if default else ""
    if isinstance(default, tuple):
        default = ("x" if key.endswith("shape") else ",").join(str(part) for part in default)
    return f" (default: {f'${_VARIABLES[key]}, else ' if key in _VARIABLES else ''}{default or 'none'})"
