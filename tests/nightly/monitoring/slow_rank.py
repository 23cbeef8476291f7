"""ddptrain, of which one rank takes longer over each step: its number is the first argument."""

import os
import runpy
import sys
import time
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

SLOWER_S = 0.3


def wait(module: torch.nn.Module, _: Any) -> None:
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        time.sleep(SLOWER_S)


if os.environ["RANK"] == sys.argv.pop(1):
    register_module_forward_pre_hook(wait)
runpy.run_module("ddptrain", run_name="__main__", alter_sys=True)
