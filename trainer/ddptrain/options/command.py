"""All groups of options as one command line: a flag, else the environment, else the recipe, else the default."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

from ddptrain.options.augmentation import AugmentationOptions
from ddptrain.options.checkpoints import CheckpointOptions
from ddptrain.options.data import DataOptions
from ddptrain.options.field import flag_of, key_of
from ddptrain.options.machine import DEVICES, MachineOptions
from ddptrain.options.model import ModelOptions
from ddptrain.options.optimizer import OptimizerOptions
from ddptrain.options.ranks import RankOptions
from ddptrain.options.training import TrainingOptions
from ddptrain.options.watch import WatchOptions
from ddptrain.recipes import RECIPES, Recipe, RecipeError, read_recipe, recipe_names
from ddpwire import commandline, names
from ddpwire.exits import Exit

EPILOG = """\
Examples:
  ddptrain                                        digits, one process
  ddptrain --spawn 2                              the same on two ranks of this machine
  torchrun --nproc-per-node 2 -m ddptrain         the same, started by torchrun
  ddprun --nproc-per-node 2 -m ddptrain --recipe mnist-simple --epochs 3
  ddptrain --recipe folder-resnet18-pretrained --data-dir photos
  ddptrain --profile 5                            a trace of five steps, for https://ui.perfetto.dev
  ddptrain export checkpoints weights.pt          the weights alone; ddptrain export --help
  ddptrain fit --params 8e9 --memory 80GB         does it fit into the GPU? ddptrain fit --help

Stopping: SIGTERM and SIGUSR1, on any rank, save a checkpoint after the running step and exit with 143 and 138;
Ctrl-C does so with 130, a terminal that is closed with 143. The same command goes on from
there, with the same weights as if it had never stopped.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one training was asked to do, with the recipe filled in; each group under its title in the help."""

    data: Annotated[DataOptions, "what is trained on"]
    augmentation: Annotated[AugmentationOptions, "how images are changed"]
    model: Annotated[ModelOptions, "what is trained"]
    training: Annotated[TrainingOptions, "how"]
    optimizer: Annotated[OptimizerOptions, "how a gradient becomes a step"]
    checkpoints: Annotated[CheckpointOptions, "checkpoints"]
    machine: Annotated[MachineOptions, "the machine"]
    ranks: Annotated[RankOptions, "the ranks"]
    watch: Annotated[WatchOptions, "what is seen of it"]


GROUPS: dict[str, Any] = get_type_hints(Options)
TITLES = {name: hint.__metadata__[0] for name, hint in get_type_hints(Options, include_extras=True).items()}
_VARIABLES = {"device": names.DEVICE, "checkpoint_dir": names.CHECKPOINT_DIR}  # what the environment may say


class Parser(commandline.Parser):
    """Says what is wrong from one rank alone."""

    quiet = False
    source = ""  # where the arguments come from, when not from the command line

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        if self.quiet:
            self.exit(Exit.USAGE)
        super().error(message)

    def told(self, message: str) -> str:
        """With where it stands."""
        return self.source + super().told(message)


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Options:
    """The options of a command line. Exits with 2 on a wrong one."""
    parser = _parser(quiet=environ.get(names.RANK, "0") != "0")
    given = vars(parser.parse_args(arguments))
    if "batch_size" in given and given.get("batch_size_per_rank"):
        parser.error("--batch-size and --batch-size-per-rank say the same thing twice: give one of them")
    placed = [flag for flag in ("rank", "world_size", "init_method") if flag in given]
    if given.get("spawn", 1) > 1 and placed:
        parser.error(f"--spawn starts its ranks by itself: leave out --{placed[0].replace('_', '-')}")
    name = given.pop("recipe", None) or RECIPES[given.get("data", "digits")]
    values = _recipe(name, parser) | _of_environment(environ, parser) | given
    required = [flag_of(item) for kind in GROUPS.values() for item in fields(kind) if item.default is MISSING]
    if missing := sorted(flag for flag in required if flag.removeprefix("--").replace("-", "_") not in values):
        told = " and ".join([", ".join(missing[:-1]), missing[-1]] if missing[1:] else missing)
        parser.error(f"recipe {name}: {told} {'are' if missing[1:] else 'is'} given nowhere")
    return Options(**{group: _group(kind, values) for group, kind in GROUPS.items()})


def _recipe(name: str, parser: Parser) -> dict[str, Any]:
    """The values of a recipe. It is written as options are, and read as if they were given first."""
    try:
        recipe: Recipe = read_recipe(name)
    except RecipeError as error:
        parser.error(f"argument --recipe: {error}")
    parser.source = f"recipe {name}: "
    values = vars(parser.parse_args(recipe.arguments))
    parser.source = ""
    return values


def shaping(options: Options, *, batch_size: int) -> dict[str, Any]:
    """The options that a checkpoint must agree with, as torch.load reads them back; ``batch_size`` over all ranks.

    Not the epochs: a training may be made longer, and the schedule is then that of the longer one.
    """
    groups = [getattr(options, name) for name in GROUPS]
    values = {
        key_of(item): getattr(one, item.name) for one in groups for item in fields(one) if item.metadata["shapes"]
    }
    return values | {"batch_size": batch_size}


def _group(kind: Any, values: Mapping[str, Any]) -> Any:
    """A group, its fields' own defaults where there is no value."""
    return kind(**{item.name: values[key_of(item)] for item in fields(kind) if key_of(item) in values})


def _of_environment(environ: Mapping[str, str], parser: Parser) -> dict[str, Any]:
    """What the launcher's variables say."""
    values: dict[str, Any] = {key: environ[name] for key, name in _VARIABLES.items() if environ.get(name)}
    if values.get("device", "auto") not in DEVICES:
        parser.error(f"{names.DEVICE}={values['device']!r} is not auto, cuda or cpu")
    if "checkpoint_dir" in values:
        values["checkpoint_dir"] = Path(values["checkpoint_dir"])
    return values


def _parser(*, quiet: bool) -> Parser:
    parser = Parser(
        prog="ddptrain",
        usage="ddptrain [OPTIONS]\n       ddptrain export SOURCE TARGET\n       ddptrain fit [OPTIONS]",
        description="Train an image classifier with DistributedDataParallel: one rank of it, or all in one process.",
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
            argument = dict(one.metadata["argument"])
            argument["help"] += _told_default(one)
            arguments.add_argument(flag_of(one), dest=key_of(one), default=argparse.SUPPRESS, **argument)
    return parser


def _told_default(item: Field[Any]) -> str:
    """The end of an option's help: its default."""
    key, default = key_of(item), item.default
    if default is MISSING:
        return " (default: the recipe's)"
    if default is None:
        return ""  # the help says what it means
    if isinstance(default, bool):
        return " (default)" if default else ""
    if isinstance(default, tuple):
        default = ("x" if key.endswith("shape") else ",").join(str(part) for part in default)
    return f" (default: {f'${_VARIABLES[key]}, else ' if key in _VARIABLES else ''}{default})"
