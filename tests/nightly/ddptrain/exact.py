"""Run on each rank: ddptrain, stopped by itself after as many steps as the first argument says; 0: never."""

import os
import sys
import time

from ddptrain.config import parse_options
from ddptrain.main import run


class Asked:
    """A signal that comes after some steps."""

    def __init__(self, steps: int) -> None:
        self.num_steps_left = steps
        self.can_save = False

    @property
    def code(self) -> int:
        self.num_steps_left -= 1
        return 143 if self.num_steps_left == 0 else 0


code = run(parse_options(sys.argv[2:], os.environ), os.environ, Asked(int(sys.argv[1])), started=time.monotonic())
sys.stdout.flush()
os._exit(code)
