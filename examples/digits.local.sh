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
if [[ -v CUDA_VISIBLE_DEVICES ]]; then # as CUDA reads it: until the first invalid entry, and none if one is there twice
  kind='[[:space:]]*\+?0*([0-9]+)'
  case $CUDA_VISIBLE_DEVICES in GPU-* | MIG-*) kind="(${CUDA_VISIBLE_DEVICES::4}.*)" ;; esac
  IFS=, read -ra entries <<<"$CUDA_VISIBLE_DEVICES"
  for entry in "${entries[@]}"; do
    [[ $entry =~ ^$kind ]] || break
    gpu=${BASH_REMATCH[1]}
    if [[ " ${gpus[*]} " == *" $gpu "* ]]; then
      gpus=()
      break
    fi
    gpus+=("$gpu")
  done
else
  code=0
  listed=$(nvidia-smi --query-gpu=uuid --format=csv,noheader 2>&1) || code=$?
  case $code in
    0) mapfile -t gpus < <(grep -E '^(GPU|MIG)-' <<<"$listed") ;; # it may also print warnings
    6 | 127) ;; # no device, no nvidia-smi
    *)
      echo "nvidia-smi failed: ${listed##*$'\n'}: mend the driver, or export CUDA_VISIBLE_DEVICES= for CPU ranks" >&2
      exit 69
      ;;
  esac
fi
if [[ 4 -gt 1 && ${gpus[*]} == MIG-* ]]; then
  echo "2 nodes x 2 GPUs: CUDA_VISIBLE_DEVICES names MIG instances, which are not shared out among ranks: export CUDA_VISIBLE_DEVICES= for CPU ranks" >&2
  exit 78
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
    python3 -P -m ddprun --grace 30 -m ddptrain --epochs 10 &
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
