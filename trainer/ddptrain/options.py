"""The command line of ddptrain. Knows nothing of torch, so that ``--help`` is instant.

A field of ``Options`` carries its help, range and default; the parser is made from the fields.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from ddptrain.recipes import MODELS, RECIPES
from ddpwire import names
from ddpwire.exits import Exit

EPILOG = """\
Examples:
  ddptrain                                        digits, one process
  torchrun --nproc-per-node 2 -m ddptrain         the same on two ranks
  ddprun --nproc-per-node 2 -m ddptrain --data mnist --model simple --epochs 3

Stopping: SIGTERM and SIGUSR1, on any rank, save a checkpoint after the running step and exit with 143 and 138;
Ctrl-C does so with 130. The same command goes on from there, with the same weights as if it had never stopped.
"""


def whole(lowest: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from ``lowest``."""

    def parse_whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {lowest}")
        return value

    return parse_whole


def real(lowest: float, below: float = math.inf) -> Callable[[str], float]:
    """An argparse type: numbers from ``lowest`` to under ``below``."""

    def parse_real(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not lowest <= value < below:
            upper = "" if below == math.inf else f" and below {below:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {lowest:g}{upper}")
        return value

    return parse_real


def image_shape(text: str) -> tuple[int, int, int]:
    """An argparse type: CxHxW with H = W."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts) or parts[1] != parts[2]:
        raise argparse.ArgumentTypeError(f"{text!r} is not CHANNELSxSIZExSIZE, such as 3x32x32")
    return int(parts[0]), int(parts[1]), int(parts[2])


def option(group: str, text: str, *, shapes: bool = False, **argument: Any) -> Any:
    """A field that is an option. ``shapes``: a checkpoint trained with another value cannot be gone on with.

    Without a default, the data set's recipe has it.
    """
    default = argument.get("default", MISSING)
    return field(default=default, metadata={"group": group, "shapes": shapes, "argument": {"help": text, **argument}})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one training was asked to do, with the data set's recipe filled in."""

    data: str = option("what", "data set: %(choices)s", shapes=True, default="digits", choices=tuple(RECIPES))
    model: str = option("what", "%(choices)s", shapes=True, choices=MODELS)
    data_dir: Path = option(  # noqa: RUF009 - it makes a dataclasses.field
        "what",
        "where mnist and cifar10 are read, and downloaded to if they are not there",
        type=Path,
        default=Path("data"),
    )
    synthetic_samples: int = option(
        "what", "training images of the synthetic data", shapes=True, type=whole(1), default=4096, metavar="N"
    )
    synthetic_shape: tuple[int, int, int] = option(
        "what", "their channels, height and width", shapes=True, type=image_shape, default=(1, 28, 28), metavar="CxHxW"
    )
    synthetic_classes: int = option("what", "their classes", shapes=True, type=whole(2), default=10, metavar="N")

    epochs: int = option("how", "times through the training images", type=whole(1), metavar="N")
    batch_size: int = option(
        "how", "images an optimizer step, over ALL ranks together", shapes=True, type=whole(1), metavar="N"
    )
    batch_size_per_rank: int = option(
        "how",
        "images a step on each rank, in place of --batch-size; 0: --batch-size holds",
        type=whole(0),
        default=0,
        metavar="N",
    )
    lr: float = option(
        "how", "peak learning rate of SGD with Nesterov momentum", shapes=True, type=real(0.0), metavar="X"
    )
    scale_lr: bool = option(
        "how", "multiply --lr by the number of ranks", shapes=True, action="store_true", default=False
    )
    schedule: str = option(
        "how",
        "learning rate over the steps: up for 30 %% of them and down to 0, or only down (%(choices)s)",
        shapes=True,
        choices=("one-cycle", "cosine"),
        default="one-cycle",
    )
    momentum: float = option(
        "how", "0 to under 1; 0: plain SGD", shapes=True, type=real(0, 1), default=0.9, metavar="X"
    )
    weight_decay: float = option("how", "0: none", shapes=True, type=real(0.0), metavar="X")
    label_smoothing: float = option("how", "0 to under 1; 0: none", shapes=True, type=real(0, 1), metavar="X")
    augment: bool = option(
        "how",
        "no shifts and flips of training images",
        shapes=True,
        flag="--no-augment",
        action="store_false",
        default=True,
    )
    seed: int = option(
        "how", "of the weights, the order and the augmentation", shapes=True, type=whole(0), default=0, metavar="N"
    )

    checkpoint_dir: Path = option(  # noqa: RUF009
        "checkpoints", "where they are kept; rank 0 writes them", type=Path, default=Path("checkpoints")
    )
    checkpoint_every: int = option(
        "checkpoints", "also save every N steps; 0: only at the end of an epoch", type=whole(0), default=0, metavar="N"
    )
    keep: int = option("checkpoints", "newest checkpoints to keep; 0: all", type=whole(0), default=3, metavar="N")
    resume: str = option(
        "checkpoints",
        "auto: go on from the newest that loads; never: start anew, in a folder without any; PATH: from this file",
        default="auto",
        metavar="auto|never|PATH",
    )

    device: str = option("machine", "%(choices)s", choices=("auto", "cuda", "cpu"), default="auto")
    timeout_s: int = option(
        "machine",
        "longest wait for the other ranks: to come, to download data, to answer",
        flag="--timeout",
        type=whole(1),
        default=300,
        metavar="SECONDS",
    )
    deterministic: bool = option(
        "machine",
        "one thread a rank and fixed algorithms: the same seed gives the same weights, bit for bit",
        action="store_true",
        default=False,
    )


class Parser(argparse.ArgumentParser):
    """argparse, saying what is wrong in one line and from one rank."""

    quiet = False

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(Exit.USAGE, "" if self.quiet else f"ddptrain: {message}; see ddptrain --help\n")


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Options:
    """The options of a command line: a flag, else the environment, else the recipe. Exits with 2 on a wrong one."""
    parser = _parser(environ)
    given = vars(parser.parse_args(arguments))
    if given["batch_size"] is not None and given["batch_size_per_rank"]:
        parser.error("--batch-size and --batch-size-per-rank say the same thing twice: give one of them")
    if given["device"] not in ("auto", "cuda", "cpu"):  # argparse does not check defaults
        parser.error(f"{names.DEVICE}={given['device']!r} is not auto, cuda or cpu")
    recipe = RECIPES[given["data"]]
    return Options(**{key: getattr(recipe, key) if value is None else value for key, value in given.items()})


def shaping(options: Options, *, batch_size: int) -> dict[str, Any]:
    """The options that a checkpoint must agree with, as torch.load reads them back; ``batch_size`` over all ranks.

    Not the epochs: a training may be made longer, and the schedule is then that of the longer one.
    """
    values = {item.name: getattr(options, item.name) for item in fields(options) if item.metadata["shapes"]}
    return values | {"batch_size": batch_size}


def _parser(environ: Mapping[str, str]) -> Parser:
    parser = Parser(
        prog="ddptrain",
        description="Train an image classifier with DistributedDataParallel: one rank of it, or all in one process.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.quiet = environ.get(names.RANK, "0") != "0"
    titles = {"what": "what is trained", "how": "how", "checkpoints": "checkpoints", "machine": "the machine"}
    groups = {name: parser.add_argument_group(title) for name, title in titles.items()}
    for item in fields(Options):
        argument = {"default": None, **item.metadata["argument"]}
        flag = argument.pop("flag", "--" + item.name.replace("_", "-"))
        argument["help"] += _told_default(item.name, argument["default"])
        groups[item.metadata["group"]].add_argument(flag, dest=item.name, **argument)
    parser.set_defaults(
        device=environ.get(names.DEVICE) or "auto",
        checkpoint_dir=Path(environ.get(names.CHECKPOINT_DIR) or "checkpoints"),
    )
    return parser


def _told_default(name: str, default: object) -> str:
    """The end of an option's help: its default."""
    if isinstance(default, bool):
        return ""
    if default is None:
        return " (default: " + ", ".join(f"{data} {getattr(recipe, name)}" for data, recipe in RECIPES.items()) + ")"
    if isinstance(default, tuple):
        default = "x".join(str(part) for part in default)
    variable = {"device": names.DEVICE, "checkpoint_dir": names.CHECKPOINT_DIR}.get(name)
    return f" (default: {f'${variable}, else ' if variable else ''}{default})"
