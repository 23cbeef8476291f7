"""Where a rank's process starts: signals first, the command line next, torch last.

A signal may come while torch is imported, which takes seconds, and ``--help`` must not wait for it.
"""

import os
import sys
from typing import NoReturn

from ddptrain.options import parse
from ddpwire.signals import Signals


def main() -> NoReturn:
    """Run one rank and leave with its exit code."""
    signals = Signals()
    signals.install()
    options = parse(sys.argv[1:], os.environ)

    from ddptrain.ledger import process_start
    from ddptrain.main import run  # imports torch

    code = run(options, os.environ, signals, started=process_start())
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: gloo's threads can abort the process while the interpreter takes itself down, which also takes 1 s.
    os._exit(code)


if __name__ == "__main__":
    main()
