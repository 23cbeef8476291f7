"""Run on each rank: ddptrain in float64, stopped by itself after as many steps as the first argument says; 0: never."""

import os
import sys
import time

from torch import Tensor, nn

import ddptrain.job
from ddptrain.main import run
from ddptrain.models import ImageShape, build_model
from ddptrain.options import parse


class Double(nn.Module):
    """A model that computes in float64, whatever it is given."""

    def __init__(self, name: str, shape: ImageShape) -> None:
        super().__init__()
        self.model = build_model(name, shape).double()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images.double())
        return logits


class Asked:
    """A signal that comes after some steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.can_save = False

    @property
    def code(self) -> int:
        self.left -= 1
        return 143 if self.left == 0 else 0


ddptrain.job.build_model = Double
code = run(parse(sys.argv[2:], os.environ), os.environ, Asked(int(sys.argv[1])), started=time.monotonic())
sys.stdout.flush()
os._exit(code)
