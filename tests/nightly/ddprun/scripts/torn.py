"""Rank 1 raises in a world that torch has set up; torch's hook puts the rank before each line of the traceback."""

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("bad label 17")
dist.barrier()
