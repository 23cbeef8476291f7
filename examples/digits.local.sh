#!/usr/bin/env bash
# 2 nodes x 2 ranks of ddptrain on this machine: every node is a ddprun of its own on the loopback.
# Rendered by ddpctl render; run it as it is. RUN_DIR says where logs and checkpoints go.
set -euo pipefail

export PET_NNODES=2
export PET_NPROC_PER_NODE=2
export PET_MASTER_ADDR=127.0.0.1
PET_MASTER_PORT=$(python3 -P -m ddprun.nodectl port | tr -dc 0-9)
DDP_RUN_DIR=${RUN_DIR:-$PWD/runs/digits-$$}
export PET_MASTER_PORT DDP_RUN_DIR
mkdir -p "$DDP_RUN_DIR"
echo "logs and checkpoints: $DDP_RUN_DIR" >&2

# Every node gets its own share of the GPUs; without any, its ranks are CPU processes.
gpus=()
if [[ -v CUDA_VISIBLE_DEVICES ]]; then
  IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
elif command -v nvidia-smi >/dev/null; then
  mapfile -t gpus < <(nvidia-smi --query-gpu=uuid --format=csv,noheader)
fi
if ((${#gpus[@]} > 0 && ${#gpus[@]} < 4)); then
  echo "2 nodes x 2 GPUs: 4 needed, this machine has ${#gpus[@]}: export CUDA_VISIBLE_DEVICES= for CPU ranks" >&2
  exit 78
fi

pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' TERM
trap : INT # the terminal's Ctrl-C reaches the nodes by itself
for ((node = 0; node < 2; node++)); do
  share=("${gpus[@]:node * 2:2}")
  CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${share[*]}") PET_NODE_RANK=$node \
    python3 -P -m ddprun --run-id digits --grace 30 -m ddptrain --epochs 10 &
  pids+=("$!")
done

code=0
for pid in "${pids[@]}"; do
  status=0
  wait "$pid" || status=$?
  while kill -0 "$pid" 2>/dev/null; do # a trapped signal ends a wait early
    status=0
    wait "$pid" || status=$?
  done
  ((status == 0)) || code=$status
done
exit "$code"
