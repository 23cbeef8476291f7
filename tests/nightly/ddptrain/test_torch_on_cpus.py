"""What docs/sharding.md says of torch without a GPU: which wrappers, hooks and reductions work with gloo."""

import json
import subprocess
import sys

import torch

SCRIPT = """\
import json
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def train(model):
    for _ in range(5):
        model(torch.ones(2, 64)).sum().backward()


def hooked(hook, state=None):
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    model.register_comm_hook(state, hook)
    train(model)


def state():
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)


def reduce(dtype, op=dist.ReduceOp.SUM):
    dist.all_reduce(torch.ones(3).to(dtype), op=op)


calls = {
    "fully_shard": lambda: train(fully_shard(torch.nn.Linear(64, 64))),
    "FSDP1": lambda: FullyShardedDataParallel(torch.nn.Linear(64, 64)),
    "FSDP1 cpu": lambda: train(FullyShardedDataParallel(torch.nn.Linear(64, 64), device_id=torch.device("cpu"))),
    "powerSGD_hook": lambda: hooked(powerSGD_hook.powerSGD_hook, state()),
    "fp16_compress_hook": lambda: hooked(default_hooks.fp16_compress_hook),
    "batched_powerSGD_hook": lambda: hooked(powerSGD_hook.batched_powerSGD_hook, state()),
    "AVG int64": lambda: reduce(torch.int64, dist.ReduceOp.AVG),
    "MAX int64": lambda: reduce(torch.int64, dist.ReduceOp.MAX),
    "SUM float64": lambda: reduce(torch.float64),
    "SUM int16": lambda: reduce(torch.int16),
    "SUM uint32": lambda: reduce(torch.uint32),
    "SUM float8": lambda: reduce(torch.float8_e4m3fn),
}
seen = {}
for name, call in calls.items():
    try:
        call()
    except Exception as error:
        seen[name] = type(error).__name__
    else:
        seen[name] = ""
print(json.dumps(seen))
"""


def test_what_the_guide_says_of_gloo(tmp_path):
    argv = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    seen = json.loads(done.stdout)
    if torch.cuda.is_available():
        del seen["FSDP1"]
    works = ("fully_shard", "FSDP1 cpu", "powerSGD_hook", "fp16_compress_hook", "MAX int64", "SUM float64")
    assert {name for name, error in seen.items() if not error} == {*works}
    assert seen["batched_powerSGD_hook"] == "AssertionError"
