"""Where a rank's process starts: signals first, the command line next, torch last.

A signal may come while torch is imported, which takes seconds, and ``--help`` must not wait for it.
"""

import contextlib
import os
import sys
from importlib import import_module
from typing import NoReturn

from ddptrain.options import parse
from ddptrain.spawn import is_rank, spawn
from ddptrain.verbs import VERBS
from ddpwire.signals import Signals
from ddpwire.streams import open_closed


def main() -> NoReturn:
    """Run one rank, or a verb, and leave with its exit code."""
    open_closed()
    if sys.argv[1:2] and sys.argv[1] in VERBS:
        sys.exit(_verb(sys.argv[1], sys.argv[2:]))
    signals = Signals()
    signals.install()
    arguments = sys.argv[1:]
    options = parse(arguments, os.environ)
    if options.ranks.spawn > 1 and not is_rank(os.environ):
        sys.exit(spawn(arguments, options.ranks.spawn))

    from ddptrain.ledger import process_start
    from ddptrain.main import run  # imports torch

    code = run(options, os.environ, signals, started=process_start())
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads, or its disk is full
            stream.flush()
    # Not sys.exit: gloo's threads can abort the process while the interpreter takes itself down, which also takes 1 s.
    os._exit(code)


def _verb(name: str, arguments: list[str]) -> int:
    from ddptrain.errors import TrainError

    try:
        code: int = import_module(f"ddptrain.verbs.{name}").main(arguments)
    except TrainError as error:
        print(f"ddptrain {name}: {error.message}", file=sys.stderr)
        return error.code
    return code


if __name__ == "__main__":
    main()
