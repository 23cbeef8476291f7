#!/usr/bin/env bash
# Most people expect all_reduce to add the elements with the same index, or to refuse a tensor that is not contiguous, as
# send() does ("input tensor has to be contiguous").
# What happens: gloo takes as many elements as the tensor has from its memory, beginning at its first, without a look at
# the strides. all_reduce of one column of a matrix gives wrong sums, and also changes elements of the matrix outside
# of the column. A matrix that is transposed in memory on one rank is added in the order of memory: the ranks get
# different sums. Nothing is reported, although all shapes agree. contiguous() before the call avoids it.
# Version: torch 2.15.0, backend gloo.
# Source: found by experiment; torch/csrc/distributed/c10d/ProcessGroupGloo.cpp.
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
results = {}

matrix = torch.arange(8.0).reshape(4, 2)
dist.all_reduce(matrix[:, 0])
results["column 0, expected [0, 4, 8, 12]"] = matrix[:, 0].tolist()
results["column 1, expected [1, 3, 5, 7]"] = matrix[:, 1].tolist()

matrix = torch.arange(6.0).reshape(2, 3)
if rank == 1:
    matrix = matrix.t().contiguous().t()  # the same values
dist.all_reduce(matrix)
everyone = [None, None]
dist.all_gather_object(everyone, matrix.tolist())
results["transposed on rank 1, expected [[0, 2, 4], [6, 8, 10]] on both ranks"] = everyone

try:
    if rank == 0:
        dist.send(torch.arange(8.0).reshape(4, 2)[:, 0], 1)
    refusal = None
except RuntimeError as error:
    refusal = str(error).splitlines()[0]
if rank == 0:
    print("torch", torch.__version__)
    for name, result in results.items():
        print(f"{name}: {result}")
    print("send of a column:", refusal)
    assert refusal
assert [*results.values()] == [
    [0, 4, 4, 6],
    [2, 6, 5, 7],
    [[[0, 4, 3], [7, 6, 10]], [[0, 3, 6], [4, 7, 10]]],
], results
dist.destroy_process_group()
END
OMP_NUM_THREADS=1 "${FINDINGS_VENV:-$folder/venv/bin/python}" -m torch.distributed.run --nproc-per-node 2 "$folder/ranks.py"
