"""A job on one machine as a bash script that needs no ddpctl: what the target local renders. Pure."""

import shlex

from ddpctl.plan import Plan, counted, ddprun_args, title
from ddpwire import names
from ddpwire.exits import Exit

LOOPBACK = "127.0.0.1"
_GPU_LINES = {
    True: "# (this job's device is cpu)",
    False: """\
if [[ -v CUDA_VISIBLE_DEVICES ]]; then
  IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
elif command -v nvidia-smi >/dev/null; then
  mapfile -t gpus < <(nvidia-smi --query-gpu=uuid --format=csv,noheader)
fi""",
}


def render_script(plan: Plan, python: str) -> str:
    """The job as a bash script that needs no ddpctl."""
    job = plan.job
    need = job.max_nodes * job.gpus
    asked = f"{counted(job.max_nodes, 'node')} x {counted(job.gpus, 'GPU')}"
    exports = {
        **job.env,
        names.NNODES: job.nodes,
        names.NPROC_PER_NODE: str(job.gpus),
        names.NODE_MASTER_ADDR: LOOPBACK,
    }
    if job.device != "auto":
        exports[names.DEVICE] = job.device
    lines = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in exports.items())
    port = str(job.port) if job.port else f"$({shlex.quote(python)} -P -m ddprun.nodectl port | tr -dc 0-9)"
    return f"""\
#!/usr/bin/env bash
# {title(job)} on this machine: every node is a ddprun of its own on the loopback.
# Rendered by ddpctl render; run it as it is. RUN_DIR says where logs and checkpoints go.
set -euo pipefail

{lines}
{names.NODE_MASTER_PORT}={port}
{names.RUN_DIR}=${{RUN_DIR:-$PWD/runs/{plan.run}-$$}}
export {names.NODE_MASTER_PORT} {names.RUN_DIR}
mkdir -p "${names.RUN_DIR}"
echo "logs and checkpoints: ${names.RUN_DIR}" >&2

# Every node gets its own share of the GPUs; without any, its ranks are CPU processes.
gpus=()
{_GPU_LINES[job.device == "cpu"]}
if ((${{#gpus[@]}} > 0 && ${{#gpus[@]}} < {need})); then
  echo "{asked}: {need} needed, this machine has ${{#gpus[@]}}: export CUDA_VISIBLE_DEVICES= for CPU ranks" >&2
  exit {Exit.CONFIG:d}
fi

pids=()
trap 'kill -TERM "${{pids[@]}}" 2>/dev/null || true' TERM
trap : INT # the terminal's Ctrl-C reaches the nodes by itself
for ((node = 0; node < {job.max_nodes}; node++)); do
  share=("${{gpus[@]:node * {job.gpus}:{job.gpus}}}")
  CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${{share[*]}}") {names.NODE_RANK}=$node \\
    {shlex.quote(python)} -P -m ddprun {shlex.join(ddprun_args(plan))} &
  pids+=("$!")
done

code=0
for pid in "${{pids[@]}}"; do
  status=0
  wait "$pid" || status=$?
  while kill -0 "$pid" 2>/dev/null; do # a trapped signal ends a wait early
    status=0
    wait "$pid" || status=$?
  done
  ((status == 0)) || code=$status
done
exit "$code"
"""
