#!/usr/bin/env bash
# 2 nodes x 2 ranks of ddptrain on this machine. Each node is a ddprun process on the loopback interface.
# Rendered by ddpctl render. RUN_DIR sets the folder for logs and checkpoints.
set -euo pipefail

export PET_NNODES=2
export PET_MASTER_ADDR=127.0.0.1
PET_MASTER_PORT=$(python3 -P -m ddprun.nodectl port | tr -dc 0-9)
DDP_RUN_DIR=${RUN_DIR:-$PWD/runs/digits-$$}
DDP_SECRET_FILE=$DDP_RUN_DIR/store.secret
export PET_MASTER_PORT DDP_RUN_DIR DDP_SECRET_FILE
mkdir -p "$DDP_RUN_DIR" && { [ -s "$DDP_RUN_DIR"/store.secret ] ||
  (umask 077 && od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n' >"$DDP_RUN_DIR"/store.secret); }
echo "logs and checkpoints: $DDP_RUN_DIR" >&2

# Find the GPUs, and divide them among the nodes. Without GPUs, the ranks use the CPU.
_ddp_listed=$(python3 -P -m ddprun.nodectl gpus) || {
  echo "repair the driver, or export CUDA_VISIBLE_DEVICES= (to use CPUs)" >&2
  exit 69
}
mapfile -t _ddp_gpus < <(grep . <<<"$_ddp_listed")
if [[ 4 -gt 1 && ${_ddp_gpus[*]} == MIG-* ]]; then
  echo "2 nodes x 2 GPUs: CUDA_VISIBLE_DEVICES names MIG instances, but only a job with one GPU can use a MIG instance: to use CPUs, run export CUDA_VISIBLE_DEVICES=" >&2
  exit 78
fi
if ((${#_ddp_gpus[@]} > 0 && ${#_ddp_gpus[@]} < 4)); then
  echo "the job needs 4 GPUs (2 nodes x 2 GPUs), but this machine has ${#_ddp_gpus[@]}:" \
    "to use CPUs, run export CUDA_VISIBLE_DEVICES=" >&2
  exit 78
fi

_ddp_pids=()
_ddp_counts=(2 2)
trap 'kill -TERM "${_ddp_pids[@]}" 2>/dev/null || true' TERM
trap : INT # the terminal also sends Ctrl-C to the nodes
for ((_ddp_node = 0; _ddp_node < 2; _ddp_node++)); do
  _ddp_share=("${_ddp_gpus[@]::_ddp_counts[_ddp_node]}") _ddp_gpus=("${_ddp_gpus[@]:_ddp_counts[_ddp_node]}")
  CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${_ddp_share[*]}") PET_NODE_RANK=$_ddp_node \
    PET_NPROC_PER_NODE=${_ddp_counts[_ddp_node]} \
    python3 -P -m ddprun --grace 30 -m ddptrain --epochs 10 &
  _ddp_pids+=("$!")
done

_ddp_code=0
for _ddp_pid in "${_ddp_pids[@]}"; do
  while kill -0 "$_ddp_pid" 2>/dev/null; do sleep 0.2 || true; done # a wait that a signal interrupts may lose the code
  wait "$_ddp_pid" || _ddp_code=$?
done
exit "$_ddp_code"
