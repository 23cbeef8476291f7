#!/usr/bin/env bash
# Most people expect all_reduce with ReduceOp.MAX or MIN to treat a NaN of one rank as torch.max does, which returns
# NaN, so that the worst loss or gradient norm of all ranks is NaN if one rank has diverged.
# What happens: whether the NaN survives depends on the rank that has it and on its place in the tensor. It survives
# where its rank is the first in the chain of comparisons, and each part of the tensor begins at another rank. With one
# element, only a NaN of rank 0 is seen. With 5 elements on 2 ranks, NaNs of rank 0 in all of them are left in 4, and
# those of rank 1 in 1. All ranks agree on the result. SUM is NaN whichever rank it comes from. What helps is to reduce
# a flag: all_reduce of isnan() as a number.
# Version: torch 2.15.0, backend gloo, float32 on a CPU.
# Source: found by experiment; std::max and std::min in gloo/math.h, whose first argument stays if one is NaN.
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
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


def left(diverged: int, length: int, op: dist.ReduceOp) -> int:
    """How many elements are NaN on all ranks, if all elements of the rank diverged are NaN before."""
    values = torch.full((length,), float("nan") if rank == diverged else 1.0)
    dist.all_reduce(values, op)
    everyone = [torch.empty(length) for _ in range(ranks)]
    dist.all_gather(everyone, values)
    counts = {int(one.isnan().sum()) for one in everyone}
    assert len(counts) == 1, counts  # all ranks agree
    return counts.pop()


if rank == 0:
    print("torch", torch.__version__.partition("+")[0])
    print("torch.max of [1, NaN]:", torch.tensor([1, float("nan")]).max().item())
for length in (1, 5):
    for name in ("MAX", "MIN", "SUM"):
        seen = [left(diverged, length, getattr(dist.ReduceOp, name)) for diverged in range(ranks)]
        if rank == 0:
            print(f"{ranks} ranks, {name} of {length}: NaNs left if rank 0, 1, ... has only NaN: {seen}")
dist.destroy_process_group()
END
for ranks in 2 3; do
  OMP_NUM_THREADS=1 "${FINDINGS_VENV:-$folder/venv/bin/python}" -m torch.distributed.run \
    --nproc-per-node "$ranks" "$folder/ranks.py"
done | tee "$folder/seen"
diff "$folder/seen" - <<'END'
torch 2.15.0
torch.max of [1, NaN]: nan
2 ranks, MAX of 1: NaNs left if rank 0, 1, ... has only NaN: [1, 0]
2 ranks, MIN of 1: NaNs left if rank 0, 1, ... has only NaN: [1, 0]
2 ranks, SUM of 1: NaNs left if rank 0, 1, ... has only NaN: [1, 1]
2 ranks, MAX of 5: NaNs left if rank 0, 1, ... has only NaN: [4, 1]
2 ranks, MIN of 5: NaNs left if rank 0, 1, ... has only NaN: [4, 1]
2 ranks, SUM of 5: NaNs left if rank 0, 1, ... has only NaN: [5, 5]
torch 2.15.0
torch.max of [1, NaN]: nan
3 ranks, MAX of 1: NaNs left if rank 0, 1, ... has only NaN: [1, 0, 0]
3 ranks, MIN of 1: NaNs left if rank 0, 1, ... has only NaN: [1, 0, 0]
3 ranks, SUM of 1: NaNs left if rank 0, 1, ... has only NaN: [1, 1, 1]
3 ranks, MAX of 5: NaNs left if rank 0, 1, ... has only NaN: [2, 2, 1]
3 ranks, MIN of 5: NaNs left if rank 0, 1, ... has only NaN: [2, 2, 1]
3 ranks, SUM of 5: NaNs left if rank 0, 1, ... has only NaN: [5, 5, 5]
END
