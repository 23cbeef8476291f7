#!/usr/bin/env bash
# Most people expect reduce(tensor, dst=0) to put the sum into rank 0's tensor and to leave the others' tensors as they
# are: the documentation says that only dst receives the result.
# What happens: gloo uses the others' tensors for sums on the way. With three ranks that hold 1, 10 and 100, rank 1 is
# left with 110 in some elements and the whole sum 111 in others, and rank 2 with 100 and 101. Which element gets what
# depends on its place and on dst. A rank that goes on with its own value, such as a loss that it logs or a count that
# it adds up, has a wrong one that looks right. A clone() as the argument avoids it.
# Version: torch 2.15.0, backend gloo, CPU.
# Source: found by experiment; the documentation of torch.distributed.reduce, "Input and output of the collective".
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
rank = dist.get_rank()
if rank == 0:
    print("torch", torch.__version__.partition("+")[0])
for dst in range(2):
    tensor = torch.full((3,), 10**rank)
    dist.reduce(tensor, dst)
    seen: list[list[int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, tensor.tolist())
    if rank == 0:
        for of, values in enumerate(seen):
            print(f"dst {dst}: rank {of} had {10**of}, has {values}{' (the result)' if of == dst else ''}")
dist.destroy_process_group()
END
OMP_NUM_THREADS=1 "${FINDINGS_VENV:-$folder/venv/bin/python}" -m torch.distributed.run \
  --nproc-per-node 3 "$folder/ranks.py" | tee "$folder/seen"
diff "$folder/seen" - <<'END'
torch 2.15.0
dst 0: rank 0 had 1, has [111, 111, 111] (the result)
dst 0: rank 1 had 10, has [110, 110, 111]
dst 0: rank 2 had 100, has [100, 100, 101]
dst 1: rank 0 had 1, has [111, 111, 1]
dst 1: rank 1 had 10, has [111, 111, 111] (the result)
dst 1: rank 2 had 100, has [100, 100, 101]
END
