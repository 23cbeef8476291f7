"""A torchrun-style script: every rank takes part in all-reduces; --fail RANK:CODE makes one of them exit in between."""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--fail", default="-1:0")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--pause", type=float, default=0.0)
args = parser.parse_args()
failing, code = map(int, args.fail.split(":"))
dist.init_process_group("gloo")
for step in range(args.steps):
    total = torch.ones(1)
    dist.all_reduce(total)
    if step == 1 and dist.get_rank() == failing and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if code < 0:
            os.kill(os.getpid(), -code)
        sys.exit(code)
    time.sleep(args.pause)
print(f"world {dist.get_world_size()}: {int(total)}")
dist.destroy_process_group()
