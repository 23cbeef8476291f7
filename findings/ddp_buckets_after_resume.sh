#!/usr/bin/env bash
# Most people expect a training that is saved and continued with the same weights, optimizer, data and world size to give
# the same bits as one without a break, at least on CPUs with deterministic operators.
# What happens: DDP orders its buckets by the order of the parameters in the first step, and after it by the order in which
# gradients have become ready. gloo adds the parts of a bucket in an order that depends on the place in the bucket. So after
# a restart, one step is added in another order than without it. Sums of two numbers do not depend on the order: with two
# ranks the weights are the same bits, with three and four ranks they are not.
# Version: torch 2.15.0, backend gloo, CPU.
# Source: met when a resumed run differed; torch/csrc/distributed/c10d/reducer.cpp (rebuild_buckets).
# An optional FINDINGS_VENV names a Python with this torch, to skip the download of 5 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [[ -z ${FINDINGS_VENV:-} ]]; then
  python3 -m venv "$folder/venv"
  "$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.15.0 numpy==2.4.6
fi
for variable in "${!PET_@}" "${!TORCHELASTIC_@}"; do unset "$variable"; done
cat >"$folder/ranks.py" <<'END'
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.use_deterministic_algorithms(True)


def train(model: nn.Module, steps: range) -> None:
    ddp = DistributedDataParallel(model)
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        loss = ddp(torch.randn(8, 33, generator=generator)).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.1 * weight.grad


torch.manual_seed(0)
straight = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 17), nn.Tanh(), nn.Linear(17, 3))
resumed = copy.deepcopy(straight)
again = copy.deepcopy(straight)
train(straight, range(6))
train(again, range(6))
train(resumed, range(3))
train(resumed, range(3, 6))  # a new DDP, as after a restart


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


result = same(straight, again), same(straight, resumed)
if rank == 0:
    print(f"torch {torch.__version__}, {size} ranks: repeated: same bits {result[0]}; resumed: same bits {result[1]}")
assert result == (True, size == 2), result
dist.destroy_process_group()
END
for ranks in 2 3 4; do
  OMP_NUM_THREADS=1 "${FINDINGS_VENV:-$folder/venv/bin/python}" -m torch.distributed.run --nproc-per-node $ranks "$folder/ranks.py"
done
