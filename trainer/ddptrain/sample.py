"""``ddptrain sample``: generate text with a GPT that was trained with ``--data text``."""

import contextlib
import os
import sys
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

from ddptrain.config import TEXT_MODEL, ModelOptions, Parser, real, whole
from ddptrain.errors import TrainError
from ddptrain.export import choose_checkpoint, read_part
from ddpwire.exits import Exit


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit code. Raises TrainError."""
    parser = Parser(
        prog="ddptrain sample",
        description="Generate text on the CPU with the GPT in a checkpoint.",
        epilog="Example: ddptrain sample checkpoints --prompt 'The ' --bytes 500",
    )
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="a run's folder, a checkpoint folder or a file")
    add("--best", action="store_true", help="use the checkpoint with the highest test accuracy")
    add("--prompt", default="", metavar="TEXT", help="start of the text (default: a line break)")
    add("--bytes", type=whole(1), default=300, metavar="N", help="number of bytes to generate (default: 300)")
    add("--temperature", type=real(0.0), default=0.8, metavar="X", help="0: the most probable byte (default: 0.8)")
    add("--seed", type=whole(0), default=0, metavar="N", help="random seed (default: 0)")
    given = parser.parse_args(arguments)

    from ddptrain.gpt import generate  # imports torch
    from ddptrain.models import build_gpt

    path, checkpoint = choose_checkpoint(given.source, best=given.best)
    _, weights = read_part(path, checkpoint, "auto")
    shaping = checkpoint.shaping
    if shaping.get("model") != TEXT_MODEL:
        raise TrainError(Exit.CONFIG, f"{path} has the model {shaping.get('model')}", hint="only gpt generates text")
    options = ModelOptions(name=TEXT_MODEL, **{name: shaping[name] for name in ("layers", "width", "heads")})
    model = build_gpt(options, context=shaping["context"])
    model.load_state_dict(weights)
    prompt = given.prompt.encode(errors="surrogateescape")
    text = generate(model.float().eval(), prompt, temperature=given.temperature, seed=given.seed)
    with contextlib.suppress(BrokenPipeError):  # the reader has closed the pipe
        for written in chain([prompt], (bytes([byte]) for byte in islice(text, given.bytes)), [b"\n"]):
            os.write(sys.stdout.fileno(), written)
    return Exit.OK
