"""Sets variables that torch reads while it is imported; its neighbour facts.py is found although it is elsewhere."""

import logging
import os
import sys
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_LOGS"] = "+dynamo"
os.environ["TMPDIR"] = "/var/tmp"

import facts
import torch

facts.start(globals())
facts.fact("torch.get_num_threads()", torch.get_num_threads)
facts.fact("torch.get_num_interop_threads() is positive", lambda: torch.get_num_interop_threads() > 0)
facts.fact("level of the logger torch._dynamo", lambda: logging.getLogger("torch._dynamo").level)
facts.fact("tempfile.gettempdir()", tempfile.gettempdir)
facts.fact("torch.ones(2).sum()", lambda: torch.ones(2).sum().item())
facts.fact("hash('a') with PYTHONHASHSEED=7", lambda: hash("a"))
facts.fact("sys.flags.optimize, __debug__ with PYTHONOPTIMIZE=1", lambda: [sys.flags.optimize, __debug__])
facts.save()
sys.exit(3)
