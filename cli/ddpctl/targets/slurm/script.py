"""The batch script: what Slurm runs on the first node of a job. Pure text from a plan.

It renders no number that Slurm knows, so that options of sbatch win, and no constant of a site. slurm/README.md
explains every line of it.
"""

import shlex
from pathlib import PurePath

from ddpctl.plan import Plan, ddprun_args, script_of, title
from ddpctl.spec import JobSpec
from ddpctl.targets.slurm.directives import directives
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.pieces import Runtime
from ddpctl.targets.slurm.requeue import ending
from ddpctl.targets.slurm.runtimes import runtime_of
from ddpwire import names
from ddpwire.exits import Exit
from ddpwire.targets import TARGETS

# Left over from whoever submitted from inside of another job, they would be taken for options of our srun.
FOREIGN = """SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_NTASKS_PER_GPU SLURM_TASKS_PER_NODE \\
  SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_CPUS_PER_GPU SLURM_GPU_BIND SLURM_CPU_BIND SLURM_CPU_BIND_LIST \\
  SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE SLURM_MEM_BIND SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU \\
  SLURM_MEM_PER_NODE SLURM_DISTRIBUTION SLURM_EXPORT_ENV SLURM_HINT SLURM_KILL_BAD_EXIT SLURM_LABELIO \\
  SLURM_OVERCOMMIT SLURM_WAIT SLURM_EXACT"""


def render_script(plan: Plan, options: SlurmOptions) -> str:
    """The whole script. With a relative run_dir it finds its folders by itself, when it runs."""
    job, runtime = plan.job, runtime_of(plan.job, options)
    parts = (
        _header(plan, options),
        _settings(plan, options, runtime),
        _check(job, runtime),
        _start(plan, options, runtime),
        ending(options.requeues),
    )
    return "\n".join(parts)


def _header(plan: Plan, options: SlurmOptions) -> str:
    python = "ddpctl[train] on every node (PYTHON=/path/to/venv/bin/python sbatch ...) and "
    lines = "\n".join(f"#SBATCH {line}" for line in directives(plan.job, options))
    if not PurePath(plan.run_dir).is_absolute():
        lines += "\n#SBATCH --output=%x-%j.log"
    return f"""\
#!/usr/bin/env bash
# {title(plan.job)}, one ddprun a node. Rendered by ddpctl render; sbatch takes it as it is, and options
# of sbatch win: sbatch --nodes=4 --time=2:00:00 --partition=NAME THIS_FILE
# It needs {python if options.runtime == "none" else ""}a submit folder that all nodes share.
# To change: the #SBATCH lines, which ask for resources, and the program at the end of the srun line.
{lines}
"""


def _settings(plan: Plan, options: SlurmOptions, runtime: Runtime) -> str:
    job = plan.job
    rendered = PurePath(plan.run_dir).is_absolute()
    task = "${SLURM_ARRAY_TASK_ID:+/task-$SLURM_ARRAY_TASK_ID}"
    run_dir = "${RUN_DIR:-$workdir/runs/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}"
    if rendered:
        run_dir = shlex.quote(plan.run_dir)
    checkpoints = "$run_dir/checkpoints"
    if rendered and (of := PurePath(plan.checkpoint_dir).parent) != PurePath(plan.run_dir):  # another run's
        checkpoints = f"{shlex.quote(str(of))}{task}/{PurePath(plan.checkpoint_dir).name}"
    nnodes = "$SLURM_JOB_NUM_NODES"
    if job.min_nodes < job.max_nodes:
        nnodes = f"$((nodes < {job.min_nodes} ? nodes : {job.min_nodes})):$nodes"
    ranks = str(job.gpus) if job.device == "cpu" else f"${{SLURM_GPUS_ON_NODE:-{job.gpus}}}"
    device = "" if job.device == "auto" else f"export {names.DEVICE}={job.device}\n"
    image = "" if options.runtime == "none" else f"export {names.IMAGE}={shlex.quote(job.image)}\n"
    modules = "".join(f"module load {shlex.quote(module)}\n" for module in options.modules)
    if modules:  # their functions were not written for a strict shell
        modules = f"set +eu\n{modules}set -eu\n"
    return f"""\
set -euo pipefail

nodes=${{SLURM_JOB_NUM_NODES:?this is a script for sbatch}}
run={plan.run}
workdir={shlex.quote(plan.cwd) if rendered else "$SLURM_SUBMIT_DIR"}
run_dir={run_dir}
run_dir+={task}
stopped=0 warned=0 woken=0 srun_pid=0
say() {{ printf 'slurm: %s\\n' "$*" >&2; }}
end() {{ # CODE CAUSE MESSAGE: the run's last word, where ddpctl status looks for it
  say "$3"
  rm -f "$run_dir/secrets"
  if mkdir -p "$run_dir/node-0"; then
    printf '{{"code": %d, "cause": "%s", "message": "%s"}}\\n' "$1" "$2" "${{3//[\\\\\\"]/_}}" \\
      >"$run_dir/node-0/outcome.json"
  fi
  exit "$1"
}}

# Slurm's warning (USR1), ddpctl stop (USR2) and scancel (TERM). The ranks are told through their step: a TERM would
# make srun kill them. scancel has told them itself, and whoever is told twice is killed.
# shellcheck disable=SC2329 # called by the traps
tell() {{
  woken=1
  [[ -s $run_dir/step ]] || return 0
  scancel --quiet --signal=TERM "$SLURM_JOB_ID.$(<"$run_dir/step")" || kill -USR1 "$srun_pid"
}}
trap 'warned=1; say "Slurm will end this job soon: the ranks save"; tell' USR1
trap 'stopped=1; say "stopped on request: the ranks save"; tell' USR2
trap 'stopped=1; woken=1; [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) != RUNNING ]] || tell' TERM

mkdir -p "$run_dir/checkpoints" || end {Exit.CANNOT_WRITE:d} unavailable "cannot write $run_dir"
rm -f "$run_dir"/node-*/{{node,outcome}}.json "$run_dir"/{{step,seen-*}}
{modules}{runtime.setup}{_secrets(job)}
# Where the nodes meet. Names are resolved here, outside of any container; the port is above the kernel's own choices.
unset "${{!PET_@}}" {names.LIFELINE_FD} {names.PROMETHEUS_MULTIPROC_DIR} \\
  {FOREIGN}
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST") ||
  end {Exit.UNAVAILABLE:d} unavailable "Slurm does not say which nodes $SLURM_JOB_NODELIST are"
[[ $(scontrol show node "$head") =~ NodeAddr=([^[:space:]]+) ]] && head=${{BASH_REMATCH[1]}}
read -r PET_MASTER_ADDR _ < <(getent ahostsv4 "$head" || getent ahosts "$head") ||
  end {Exit.UNAVAILABLE:d} unavailable "the first node, $head, has no address here"
if ((nodes > 1)) && [[ $PET_MASTER_ADDR == 127.* ]]; then # from its own hosts file: no address for the others
  read -r PET_MASTER_ADDR _ < <(hostname -I) ||
    end {Exit.UNAVAILABLE:d} unavailable "$head has only a loopback address"
fi
PET_MASTER_PORT={job.port or "$((61000 + SLURM_JOB_ID % 4536))"}
PET_NNODES={nnodes}
PET_NPROC_PER_NODE={ranks}
export PET_MASTER_ADDR PET_MASTER_PORT PET_NNODES PET_NPROC_PER_NODE
export {names.RUN_DIR}=$run_dir {names.CHECKPOINT_DIR}={checkpoints}
{device}{image}mkdir -p "${names.CHECKPOINT_DIR}"
step=(--nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --export=ALL --input=none --mpi=none --chdir="$workdir")
# A task's cores are not handed on to srun: they must be said again.
[[ -z ${{SLURM_CPUS_PER_TASK:-}} ]] || step+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
"""


def _secrets(job: JobSpec) -> str:
    if not job.secrets:
        return ""
    missing = "".join(
        f"[[ -n ${{{name}+x}} ]] ||\n"
        f'  end {Exit.CONFIG:d} config "the secret {name} is not set: export it before sbatch"\n'
        for name in job.secrets
    )
    return f"""\
if [[ -e $run_dir/secrets ]]; then # ddpctl launch wrote it
  [[ -O $run_dir/secrets && $(stat -c %a "$run_dir/secrets") == 600 ]] ||
    end {Exit.CONFIG:d} config "$run_dir/secrets is not yours alone (mode 600): it was not read"
  # shellcheck source=/dev/null
  source "$run_dir/secrets"
fi
{missing}"""


def _check(job: JobSpec, runtime: Runtime) -> str:
    script = script_of(job.command)
    what = f' "$workdir" {shlex.quote(script)}' if script is not None else ""
    return _CHECK.format(needs=runtime.needs, on_node=runtime.on_node, exits=Exit, what=what)


_CHECK = """\
# What every node must have, asked of all before anything starts.
token=seen-$SLURM_JOB_ID-$$
touch "$run_dir/$token"
read -r -d '' check <<'CHECK' || true
lacks() {{ code=$1 && shift && echo "$SLURMD_NODENAME: $*" >&2 && exit "$code"; }}
tries=0
until [ -e "$DDP_RUN_DIR/$1" ]; do # a network filesystem may take its time
  tries=$((tries + 1))
  [ "$tries" -lt 20 ] ||
    lacks {exits.NO_INPUT:d} "$DDP_RUN_DIR is not the head node's: set RUN_DIR to a folder that all nodes share"
  sleep 0.5
done
[ "$#" = 1 ] || {{ cd "$2" && [ -f "$3" ]; }} || lacks {exits.NO_INPUT:d} "$3: there is no such script in $2"
{needs}CHECK
if ((nodes > 1)) || [[ ${{ENVIRONMENT:-}} != BATCH ]]; then
  checker=(srun "${{step[@]}}" --kill-on-bad-exit=0 --wait=60)
else
  checker=()
fi
"${{checker[@]}}" bash -c "$check" check "$token"{what} ||
  end $? unavailable "not every node can run this: see the lines before this one"
rm -f "$run_dir/$token"

read -r -d '' on_node <<'NODE' || true
{on_node}NODE
"""


def _start(plan: Plan, options: SlurmOptions, runtime: Runtime) -> str:
    _, _, *words = ddprun_args(plan, deadline=False)  # the run's id has the job's number, too
    environment = "".join(f" \\\n  {shlex.quote(f'{name}={value}')}" for name, value in plan.job.env.items())
    env = f'env{environment} \\\n  "$(command -v srun)"' if environment else "srun"
    sharing = runtime.srun and f" \\\n    {runtime.srun}"
    targets = shlex.quote(options.prometheus) if options.prometheus else f"${{targets%/*}}/{TARGETS}"
    return f"""\
targets=${{run_dir%/task-*}}
targets={targets}/$run.job-$SLURM_JOB_ID.json
publish() {{ # the nodes' metrics addresses, for Prometheus' file_sd, once all nodes have said theirs
  local said=() line place groups=''
  while ((${{#said[@]}} < nodes)); do
    sleep 1
    mapfile -t said < <(exec 2>/dev/null && cd "$run_dir" &&
      sed -ns '/^ "metrics": "http:/{{F;s|.*//\\([^/"]*\\)/.*|\\1|p}}' node-*/node.json | paste - -)
  done
  for line in "${{said[@]}}"; do # node-0/node.json, a tab, an address
    line=${{line#node-}}
    printf -v place '"node": "%s", "slurm_job": "%s"' "${{line%%/*}}" "$SLURM_JOB_ID"
    printf -v line '{{"targets": ["%s"], "labels": {{"job_id": "%s", "launcher": "slurm", %s}}}}' \\
      "${{line##*$'\\t'}}" "$run" "$place"
    groups+="$line, "
  done
  mkdir -p "${{targets%/*}}" && echo "[${{groups%, }}]" >"$targets.new" && mv "$targets.new" "$targets"
}}

newest() {{ # what tells whether there is a new checkpoint
  find "$DDP_CHECKPOINT_DIR" -type f -not -name '.*' -printf '%T@ %P\\n' 2>/dev/null | sort -n | tail -n 1 || true
}}
[[ -e $run_dir/attempts ]] || echo "start: $(newest)" >"$run_dir/attempts"

code={Exit.SAVED_TERM:d}
if ((!stopped && !warned)); then
  say "job $SLURM_JOB_ID, start $((${{SLURM_RESTART_COUNT:-0}} + 1)), nodes: $nodes," \\
    "from $PET_MASTER_ADDR:$PET_MASTER_PORT, files in $run_dir"
  publish &
  publisher=$!
  # ddprun's nodes agree on one outcome: srun must not end the others because one has ended.
  {env} "${{step[@]}}" --kill-on-bad-exit=0 --wait=0{sharing} \\
    {runtime.reader} -c "$on_node" on_node {runtime.words} \\
    --run-id "$run-$SLURM_JOB_ID" {shlex.join(words)} &
  srun_pid=$!
  woken=1
  while ((woken)); do # a signal ends a wait early
    woken=0 code=0
    wait "$srun_pid" || code=$?
  done
  kill "$publisher" 2>/dev/null || true
  rm -f "$targets"
fi
"""
