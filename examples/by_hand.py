"""A script whose ranks are started by hand. Each rank gets its number on the command line.

for rank in 0 1 2 3; do python examples/by_hand.py --rank $rank --world_size 4 & done; wait
ddprun --nproc-per-node 4 --no-python sh -c 'python examples/by_hand.py --rank $RANK --world_size $WORLD_SIZE'
"""

import argparse
import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int, required=True)
parser.add_argument("--world_size", type=int, required=True)
parser.add_argument("--init_method", default="tcp://127.0.0.1:29512", help="tcp://HOST:PORT or file:///PATH")
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()

dist.init_process_group("gloo", init_method=args.init_method, rank=args.rank, world_size=args.world_size)
torch.manual_seed(0)
inputs = torch.randn(256, 10)[args.rank :: args.world_size]
targets = inputs.sum(1, keepdim=True)
model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for epoch in range(args.epochs):
    for batch, target in zip(inputs.split(8), targets.split(8), strict=True):
        loss = nn.functional.mse_loss(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {args.rank} of {args.world_size}: epoch {epoch + 1}/{args.epochs} loss {loss.item():.4f}", flush=True)
# In torch 2.13 to 2.15, destroy_process_group may abort with gloo (exit code 134) while a DDP model exists.
del model, optimizer, loss
gc.collect()
dist.destroy_process_group()
