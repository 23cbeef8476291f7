"""``ddptrain export``: write the weights of a checkpoint to a plain file that can be read without ddptrain."""

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.config import Parser
from ddptrain.errors import TrainError, log_warning, os_errors
from ddpwire.exits import Exit
from ddpwire.run_files import CHECKPOINTS, RECORD, write_atomic

if TYPE_CHECKING:
    from ddptrain.checkpoint import Checkpoint

EPILOG = """\
Examples:
  ddptrain export checkpoints weights.pt                  the newest checkpoint of a folder
  ddptrain export RUN_FOLDER --best weights.safetensors   the best checkpoint of a run
  ddptrain export checkpoints/step-00000450.pt weights.pt

Read weights.pt with torch.load("weights.pt", weights_only=True): a state_dict, for model.load_state_dict.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit code. Raises TrainError."""
    parser = Parser(
        prog="ddptrain export",
        description="Write the weights of a checkpoint as a plain .pt or .safetensors file.",
        epilog=EPILOG,
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a run's folder, a checkpoint folder or a file")
    parser.add_argument("target", type=Path, metavar="TARGET", help="weights.pt or weights.safetensors")
    parser.add_argument("--best", action="store_true", help="use the checkpoint with the highest test accuracy")
    parser.add_argument(
        "--part",
        default="auto",
        metavar="NAME",
        help="which weights: model, or ema for the averaged ones (default: ema if the checkpoint has it, else model)",
    )
    given = parser.parse_args(arguments)
    if given.target.suffix not in (".pt", ".safetensors"):
        parser.error(f"{given.target} is neither .pt nor .safetensors")

    path, checkpoint = choose_checkpoint(given.source, best=given.best)
    name, weights = read_part(path, checkpoint, given.part)
    if given.target.suffix == ".pt":
        import torch

        buffer = io.BytesIO()
        torch.save(weights, buffer)
        data = buffer.getvalue()
    else:
        try:
            from safetensors.torch import save
        except ImportError:
            hint = "pip install safetensors, or export a .pt"
            raise TrainError(Exit.NO_INPUT, "safetensors is not installed", hint=hint) from None
        data = save({name: tensor.contiguous() for name, tensor in weights.items()})
    with os_errors(Exit.CANNOT_WRITE, f"{given.target} cannot be written"):
        write_atomic(given.target, data)
    # If there are averaged weights, the accuracy is theirs.
    accuracy = None if name == "model" and "ema" in checkpoint.parts else checkpoint.accuracy
    tested = "" if accuracy is None else f", test accuracy {100 * accuracy:.2f} %"
    tensors = f"{len(weights)} tensor{'s' * (len(weights) != 1)}"
    print(f"{given.target}: {tensors} of '{name}' after step {checkpoint.step}{tested}, from {path}")
    return Exit.OK


def read_part(path: Path, checkpoint: "Checkpoint", part: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the tensors of a part of the checkpoint. Raises TrainError if it has no such part.

    "auto" selects the averaged weights if there are any, otherwise the model's.
    """
    from ddptrain.checkpoint import whole  # imports torch

    name = ("ema" if "ema" in checkpoint.parts else "model") if part == "auto" else part
    if name not in checkpoint.parts:
        raise TrainError(Exit.CONFIG, f"{path} has no part {name!r}, only {', '.join(map(repr, checkpoint.parts))}")
    return name, dict(whole(checkpoint.parts[name]))


def choose_checkpoint(source: Path, *, best: bool) -> tuple[Path, "Checkpoint"]:
    """Return the checkpoint of ``source``. Raises TrainError.

    If ``source`` is a folder, return its newest complete checkpoint or, with ``best``, its most accurate one. Print a
    warning for each checkpoint that would be preferred but cannot be used.
    """
    from ddptrain.checkpoint import first_file  # imports torch
    from ddptrain.checkpoint_directory import by_accuracy, first_whole, list_checkpoints

    folder = source / CHECKPOINTS if (source / CHECKPOINTS).is_dir() else source
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # the folder of a run may name another run's
        folder = Path(json.loads((source / RECORD).read_text())["checkpoint_dir"])
    if not folder.is_dir() and not source.is_file():
        raise TrainError(Exit.NO_INPUT, f"'{source}': no such file or folder")
    paths = [first_file(source)] if source.is_file() else list_checkpoints(folder)
    if not paths:
        raise TrainError(Exit.NO_INPUT, f"the folder '{folder}' contains no checkpoint (step-*.pt)")
    if best and not source.is_file() and not (paths := by_accuracy(paths)):
        raise TrainError(Exit.NO_INPUT, f"no checkpoint in {folder} has a known test accuracy: leave out --best")
    selected, bad = first_whole(paths)
    if selected is None:
        path, error = next(iter(bad.items()))
        more = "; no other checkpoint in this folder can be used either" if len(bad) > 1 else ""
        message = f"{path} cannot be used: {error.message}{more}"
        raise TrainError(Exit.NO_INPUT if error.reason == "io" else Exit.DATA, message)
    for path, error in bad.items():
        log_warning(f"{path} is skipped: {error.message}")
    return selected
