"""exit_with.py RANK CODE: that rank exits with the code, the others sit in a collective."""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if os.environ["RANK"] == sys.argv[1]:
    sys.exit(int(sys.argv[2]))
dist.all_reduce(torch.zeros(1))
