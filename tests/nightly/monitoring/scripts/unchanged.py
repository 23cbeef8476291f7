"""A script as it is for torchrun, which tells nothing: rank 1 ends with 0 once the file $DONE is there."""

import os
import time
from pathlib import Path

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
while not (dist.get_rank() == 1 and Path(os.environ["DONE"]).exists()):
    time.sleep(0.1)
