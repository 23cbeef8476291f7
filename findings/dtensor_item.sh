#!/usr/bin/env bash
# Most people expect a DTensor's sum(), max() or norm() to be numbers of the whole tensor, since its shape and numel()
# are those of the whole, and item() to return that number on each rank or to refuse.
# What happens: item() returns the result of the rank's own part, as do float() and int(), and nothing is reported. One
# operation more makes the result right: (d.sum() + 1).item() is the whole sum plus 1, and `d.sum() > 14` compares the
# whole. std() and any() are right at once. mean() is the mean of the whole if the ranks' parts are of different
# length, and that of the rank's part if they are of the same length. full_tensor() before item() avoids it.
# Version: torch 2.15.0, backend gloo, CPU.
# Source: found by experiment; propagate_op_sharding in torch/distributed/tensor/_sharding_prop.py passes item()
# through. https://github.com/pytorch/pytorch/issues/166638 has item(), not the operations that differ.
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
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
even, uneven = torch.tensor([1.0, 2, 4, 8]), torch.tensor([1.0, 2, 6])


def show(name: str, whole: Tensor, read: Callable[[Tensor], float]) -> None:
    """Print what the plain tensor gives, and what each rank reads from the sharded one."""
    seen: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, f"{read(distribute_tensor(whole, mesh, [Shard(0)])):.1f}")
    if dist.get_rank() == 0:
        print(f"{name}: {read(whole):.1f}, as a DTensor {' and '.join(map(str, seen))}")


if dist.get_rank() == 0:
    print("torch", torch.__version__.partition("+")[0])
show("numel()", even, lambda values: values.numel())
show("sum().item()", even, lambda values: values.sum().item())
show("float(sum())", even, lambda values: float(values.sum()))
show("(sum() + 1).item()", even, lambda values: (values.sum() + 1).item())
show("bool(sum() > 14)", even, lambda values: bool(values.sum() > 14))
show("max().item()", even, lambda values: values.max().item())
show("norm().item()", even, lambda values: values.norm().item())
show("std().item()", even, lambda values: values.std().item())
show("(values > 7).any().item()", even, lambda values: (values > 7).any().item())
show("mean().item() of 4", even, lambda values: values.mean().item())
show("mean().item() of 3", uneven, lambda values: values.mean().item())
show("sum().full_tensor().item()", even, lambda values: getattr(values.sum(), "full_tensor", values.sum)().item())
dist.destroy_process_group()
END
OMP_NUM_THREADS=1 "${FINDINGS_VENV:-$folder/venv/bin/python}" -m torch.distributed.run \
  --nproc-per-node 2 "$folder/ranks.py" | tee "$folder/seen"
diff "$folder/seen" - <<'END'
torch 2.15.0
numel(): 4.0, as a DTensor 4.0 and 4.0
sum().item(): 15.0, as a DTensor 3.0 and 12.0
float(sum()): 15.0, as a DTensor 3.0 and 12.0
(sum() + 1).item(): 16.0, as a DTensor 16.0 and 16.0
bool(sum() > 14): 1.0, as a DTensor 1.0 and 1.0
max().item(): 8.0, as a DTensor 2.0 and 8.0
norm().item(): 9.2, as a DTensor 2.2 and 8.9
std().item(): 3.1, as a DTensor 3.1 and 3.1
(values > 7).any().item(): 1.0, as a DTensor 1.0 and 1.0
mean().item() of 4: 3.8, as a DTensor 1.5 and 6.0
mean().item() of 3: 3.0, as a DTensor 3.0 and 3.0
sum().full_tensor().item(): 15.0, as a DTensor 15.0 and 15.0
END
