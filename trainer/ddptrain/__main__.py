"""The entry point of a rank and of the subcommands: install signal handlers, parse the options, then import torch.

The import of torch takes seconds. A signal may arrive during the import, and ``--help`` must not wait for the import.
"""

import contextlib
import gc
import os
import sys
from importlib import import_module
from typing import NoReturn

from ddprank.signals import Signals
from ddptrain.config import parse_options
from ddptrain.errors import TrainError
from ddptrain.spawn import spawn
from ddpwire import names
from ddpwire.exits import Exit
from ddpwire.streams import open_closed

# The modules of the subcommands. Their function ``main`` takes the arguments, and returns the exit code.
VERBS = {"export": "ddptrain.export", "fit": "ddptrain.memory_estimate", "sample": "ddptrain.sample"}


def main() -> NoReturn:
    """Run a rank or a subcommand, and exit with its code."""
    open_closed()
    if sys.argv[1:2] and sys.argv[1] in VERBS:
        sys.exit(_verb(sys.argv[1], sys.argv[2:]))
    signals = Signals()
    signals.install()
    arguments = sys.argv[1:]
    options = parse_options(arguments, os.environ)
    if options.ranks.spawn > 1 and names.RANK not in os.environ:  # a rank does not start other ranks
        sys.exit(spawn(arguments, options.ranks.spawn))

    gc.disable()  # during the import of torch, garbage collections would take a fifth of the time
    from ddptrain.goodput import process_start
    from ddptrain.main import run

    gc.freeze()
    gc.enable()
    code = run(options, os.environ, signals, started=process_start())
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader has exited, or the disk is full
            stream.flush()
    # Not sys.exit: gloo's threads can abort the process during the interpreter's shutdown, which also takes 1 s.
    os._exit(code)


def _verb(name: str, arguments: list[str]) -> int:
    try:
        return int(import_module(VERBS[name]).main(arguments))
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except TrainError as error:
        print(f"ddptrain {name}: {error}", file=sys.stderr)
        return error.code
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"ddptrain {name}: {sys.executable} has no torch: pip install torch torchvision", file=sys.stderr)
        return Exit.UNAVAILABLE


if __name__ == "__main__":
    main()
