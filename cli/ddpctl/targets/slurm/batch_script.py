"""Renders the batch script, which Slurm runs on the first node of a job.

The script does what must happen outside a container: it finds the address of node 0, starts ddprun on each node,
handles signals and requeues the job. It reads the numbers of nodes and GPUs from Slurm's variables, so that a user can
override them with options of sbatch. slurm/README.md explains every line of the script.
"""

import shlex
from pathlib import PurePath

from ddpctl.job.launch_plan import Plan, ddprun_args, script_of, title
from ddpctl.job.secrets import make_store_secret
from ddpctl.job.spec import JobSpec, size_bytes
from ddpctl.targets.slurm.containers import Runtime, runtime_of
from ddpctl.targets.slurm.options import SlurmOptions, lead_s
from ddpwire import job_env, names
from ddpwire.exits import Exit
from ddpwire.run_files import CHECKPOINTS, STARTS, STORE_SECRET, TARGETS

# Variables of another job, if the script was submitted from inside that job. srun would read them as its options.
FOREIGN = """"${!SLURM_NTASKS@}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_@}" SLURM_{NPROCS,TASKS_PER_NODE,GPUS_PER_TASK} \\
  SLURM_{TRES_PER_TASK,CPUS_PER_GPU,GPU_BIND,DISTRIBUTION,EXPORT_ENV,HINT,KILL_BAD_EXIT,LABELIO,OVERCOMMIT,WAIT,EXACT}"""


def render_script(plan: Plan, options: SlurmOptions) -> str:
    """Return the complete script. If ``plan.run_dir`` is relative, the script chooses its folders when it runs."""
    runtime = runtime_of(plan.job, options)
    parts = (
        _header(plan, options),
        _settings(plan, options, runtime),
        _rendezvous(plan.job),
        _check(plan.job, options, runtime),
        _start(plan, runtime),
        _END.format(exits=Exit, requeues=options.requeues),
    )
    return "\n".join(parts)


def _header(plan: Plan, options: SlurmOptions) -> str:
    python = ", and ddpctl[train] on each"
    python += "" if options.python else " (PYTHON=/path/to/venv/bin/python sbatch ...)"
    lines = "\n".join(f"#SBATCH {line}" for line in directives(plan.job, options))
    if not PurePath(plan.run_dir).is_absolute():
        lines += "\n#SBATCH --output=%x-%j.log"
    return f"""\
#!/usr/bin/env bash
# {title(plan.job)}, with one ddprun per node. Rendered by ddpctl render. Options on the
# command line override those below: sbatch --nodes=4 --time=2:00:00 --partition=NAME THIS_FILE
# Needs a submit folder that all nodes share{python if options.runtime == "none" else ""}.
# You may edit the #SBATCH lines, which request resources, and the program at the end of the srun line.
{lines}
"""


def _settings(plan: Plan, options: SlurmOptions, runtime: Runtime) -> str:
    job = plan.job
    rendered = PurePath(plan.run_dir).is_absolute()
    task = "${SLURM_ARRAY_TASK_ID:+/task-$SLURM_ARRAY_TASK_ID}"
    name = "_ddp_run=$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"
    run_dir = '_ddp_run_dir=$(realpath -ms -- "${RUN_DIR:-$_ddp_workdir/runs/$_ddp_run}")'
    if rendered:
        name, run_dir = f"_ddp_run={plan.run}", f"_ddp_run_dir={shlex.quote(plan.run_dir)}"
    checkpoints = f"$_ddp_run_dir/{CHECKPOINTS}"
    if rendered and (of := PurePath(plan.checkpoint_dir).parent) != PurePath(plan.run_dir):  # another run's checkpoints
        checkpoints = f"{shlex.quote(str(of))}{task}/{PurePath(plan.checkpoint_dir).name}"
    uid = f"export {names.RUN_UID}={plan.uid}${{SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}}\n" if plan.uid else ""
    store = shlex.quote(job.checkpoint_dir or "") + ("" if rendered else "/$_ddp_run")
    store = f"export {names.CHECKPOINT_STORE}={store}{task}\n" if job.checkpoint_dir else ""
    targets = shlex.quote(options.prometheus) if options.prometheus else f"${{_ddp_run_dir%/*}}/{TARGETS}"
    device = "" if job.device == "auto" else f"export {names.DEVICE}={job.device}\n"
    image = "" if options.runtime == "none" else f"export {names.IMAGE}={shlex.quote(job.image)}\n"
    modules = "".join(f"module load {shlex.quote(module)}\n" for module in options.modules)
    if modules:  # the shell functions of Environment Modules may fail under set -eu
        modules = f"set +eu\n{modules}set -eu\n"
    return f"""\
set -euo pipefail

_ddp_nodes=${{SLURM_JOB_NUM_NODES:?this is a script for sbatch}}
_ddp_workdir={shlex.quote(plan.cwd) if rendered else "$SLURM_SUBMIT_DIR"}
{name}
{run_dir}
_ddp_run+=${{SLURM_ARRAY_TASK_ID:+.task-$SLURM_ARRAY_TASK_ID}}
export {names.RUN_ID}=${{_ddp_run//[^A-Za-z0-9._-]/_}}
{uid}export {names.TARGETS_DIR}={targets} {names.LAUNCHER}=slurm
_ddp_run_dir+={task}
export {names.RUN_DIR}=$_ddp_run_dir {names.CHECKPOINT_DIR}={checkpoints}
{store}export {names.SECRET_FILE}=$_ddp_run_dir/{STORE_SECRET}
# stopped: number of requests to stop. warned: 1 after Slurm's warning. wanted, told: number of signals that the ranks
# should get, and have got. telling: 1 while tell runs. woken: 1 if a signal has interrupted wait. srun: its PID, or 0.
_ddp_stopped=0 _ddp_warned=0 _ddp_told=0 _ddp_wanted=0 _ddp_signal=TERM _ddp_telling=0 _ddp_woken=0 _ddp_srun=0
say() {{ printf 'slurm: %s\\n' "$*" >&2; }}
end() {{ # CODE CAUSE MESSAGE: end a job that cannot start, and write an outcome for ddpctl status
  say "$3"
  rm -f "$_ddp_run_dir/secrets"
  mkdir -p "$_ddp_run_dir/node-0" &&
    printf '{{"code": %d, "cause": "%s", "message": "%s"}}\\n' "$1" "$2" "${{3//[\\\\\\"]/_}}" \\
      >"$_ddp_run_dir/node-0/outcome.json"
  exit "$1"
}}

# Signals the ranks after Slurm's warning (USR1), ddpctl stop (USR2), Ctrl-C (INT) and scancel (TERM). A second signal
# kills the ranks, so only a second request to stop sends one. After scancel, Slurm itself signals the ranks.
# TERM goes to the job step, because srun would kill its tasks if it got TERM. INT goes only to ddprun, which forwards
# it: scancel might signal every process of the step, and the ranks would get INT twice.
# shellcheck disable=SC2329 # called by the traps
tell() {{
  _ddp_woken=1
  ((_ddp_srun && !_ddp_telling)) || return 0 # if a trap has interrupted tell, the outer call sends this signal too
  _ddp_telling=1
  while ((_ddp_told < _ddp_wanted)); do
    while [[ ! -s $_ddp_run_dir/step ]] && kill -0 "$_ddp_srun" 2>/dev/null; do sleep 0.2; done
    # scancel may send TERM to a step twice, so ddprun takes two signals within 5 s for one request.
    ((_ddp_told == 0)) || sleep 6
    ((_ddp_told += 1))
    [[ ! -s $_ddp_run_dir/step ]] ||
      {{ [[ $_ddp_signal == INT ]] && timeout 30 srun "${{_ddp_step[@]}}" --overlap bash -c "$_ddp_interrupt"; }} ||
      scancel --quiet --signal=TERM "$SLURM_JOB_ID.$(<"$_ddp_run_dir/step")" ||
      kill -USR1 "$_ddp_srun" || true
  done
  _ddp_telling=0
  ((_ddp_told >= _ddp_wanted)) || tell
}}
trap '_ddp_warned=1; say "Slurm will end this job soon: asking the ranks to save and end"
  ((_ddp_wanted)) || _ddp_wanted=1; tell' USR1
trap 'say "stopped on request: asking the ranks to save and end"; ((_ddp_stopped += 1)); _ddp_wanted=$_ddp_stopped
  tell' USR2
trap 'say "interrupted: the ranks get SIGINT"; ((_ddp_stopped += 1)); _ddp_wanted=$_ddp_stopped _ddp_signal=INT
  tell' INT
trap '((_ddp_stopped += 1)); _ddp_wanted=$_ddp_stopped
  [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == RUNNING ]] || _ddp_told=$_ddp_stopped; tell' TERM

{{ mkdir -p "${names.CHECKPOINT_DIR}" && {make_store_secret('"$_ddp_run_dir"')}; }} ||
  end {Exit.CANNOT_WRITE:d} unavailable "cannot write $_ddp_run_dir"
mkdir -p "${names.TARGETS_DIR}" 2>/dev/null ||
  {{ {names.TARGETS_DIR}=$_ddp_run_dir/{TARGETS} && mkdir -p "${names.TARGETS_DIR}"; }}
rm -f "$_ddp_run_dir"/node-*/{{node,outcome}}.json "$_ddp_run_dir"/{{step,seen-*}}
((${{SLURM_RESTART_COUNT:-0}})) || rm -f "$_ddp_run_dir/{STARTS}"
_ddp_job=${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}
[[ ${{ENVIRONMENT:-}} == BATCH ]] || _ddp_job=@$$:$_ddp_job # not a batch job: runs inside an allocation
printf 'slurm %s %d {options.requeues} %(%s)T\\n' \\
  "$_ddp_job" "${{SLURM_RESTART_COUNT:-0}}" "${{SLURM_JOB_START_TIME:--1}}" >>"$_ddp_run_dir/{STARTS}"
{modules}{runtime.setup}{_secrets(job)}{device}{image}"""


def _secrets(job: JobSpec) -> str:
    if not job.secrets:
        return ""
    missing = "".join(
        f"[[ -n ${{{name}+x}} ]] ||\n"
        f'  end {Exit.CONFIG:d} config "the secret {name} is not set: export it before sbatch"\n'
        for name in job.secrets
    )
    return f"""\
if [[ -e $_ddp_run_dir/secrets ]]; then # written by ddpctl launch
  [[ -O $_ddp_run_dir/secrets && $(stat -c %a "$_ddp_run_dir/secrets") == 600 ]] ||
    end {Exit.CONFIG:d} config "$_ddp_run_dir/secrets was not read: it must be your own file, with mode 600"
  # shellcheck source=/dev/null
  source "$_ddp_run_dir/secrets"
fi
{missing}"""


def _rendezvous(job: JobSpec) -> str:
    fixed = job.ranks is not None or job.device == "cpu"  # otherwise one rank per GPU that Slurm has allocated
    ranks = str(job.local_world_size) if fixed else f"${{SLURM_GPUS_ON_NODE:-{job.gpus}}}"
    more = f" {names.NODE_MASTER_PORT}={job.port}" if job.port else ""
    if job.min_nodes < job.max_nodes:
        more += f" {names.NNODES}=$((_ddp_nodes < {job.min_nodes} ? _ddp_nodes : {job.min_nodes})):$_ddp_nodes"
    return f"""\
# Unset variables that sbatch may have copied from another job or from the user: Slurm's programs would use them.
unset "${{!PET_@}}" "${{!SQUEUE_@}}" "${{!SCANCEL_@}}" {names.LIFELINE_FD} {names.PROMETHEUS_MULTIPROC_DIR} \\
  {FOREIGN}
# Find the address of node 0, outside any container.
read -r _ddp_head < <(scontrol show hostnames "$SLURM_JOB_NODELIST") ||
  end {Exit.UNAVAILABLE:d} unavailable "Slurm does not say which nodes $SLURM_JOB_NODELIST are"
[[ $(scontrol show node "$_ddp_head") =~ NodeAddr=([^[:space:]]+) ]] && _ddp_head=${{BASH_REMATCH[1]}}
read -r PET_MASTER_ADDR _ < <(getent ahostsv4 "$_ddp_head" || getent ahosts "$_ddp_head") ||
  end {Exit.UNAVAILABLE:d} unavailable "the first node, $_ddp_head, has no address here"
if ((_ddp_nodes > 1)) && [[ $PET_MASTER_ADDR == 127.* ]]; then # from /etc/hosts; other nodes cannot reach it
  read -r PET_MASTER_ADDR _ < <(hostname -I) ||
    end {Exit.UNAVAILABLE:d} unavailable "$_ddp_head has only a loopback address"
fi
export PET_MASTER_ADDR {names.NPROC_PER_NODE}={ranks}{more}
_ddp_step=(--nodes="$_ddp_nodes" --ntasks="$_ddp_nodes" --ntasks-per-node=1 --export=ALL --input=none --mpi=none
  --chdir="$_ddp_workdir")
# srun does not inherit --cpus-per-task from sbatch (since Slurm 22.05), so repeat it.
[[ -z ${{SLURM_CPUS_PER_TASK:-}} ]] || _ddp_step+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
"""


def _check(job: JobSpec, options: SlurmOptions, runtime: Runtime) -> str:
    script = script_of(job.command)
    if script is None or (options.runtime != "none" and PurePath(script).is_absolute()):  # the image may have it
        test, words = "", ""
    else:
        words = f' "$_ddp_workdir" {shlex.quote(script)}'
        test = f'{{ cd "$2" && [ -f "$3" ]; }} || lacks {Exit.NO_INPUT:d} "$3: no such script in $2"\n'
    return _CHECK.format(
        not_shared=_NOT_SHARED,
        needs=test + runtime.needs,
        on_node=runtime.on_node,
        interrupt=runtime.interrupt,
        exits=Exit,
        words=words,
    )


_NOT_SHARED = "$DDP_RUN_DIR is not the same folder as on the head node: set RUN_DIR to a folder that all nodes share"
_CHECK = """\
# Check that every node sees the run's folder and has what the run needs, before any rank starts.
_ddp_token=$_ddp_run_dir/seen-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}
touch "$_ddp_token" || end {exits.CANNOT_WRITE:d} unavailable "cannot write $_ddp_run_dir"
read -r -d '' _ddp_check <<'CHECK' || true
lacks() {{ echo "$SLURMD_NODENAME: $2" >&2 && exit "$1"; }}
for _ in {{1..20}}; do [ -e "$1" ] || sleep 0.5; done # a network filesystem may show a new file late
[ -e "$1" ] || lacks {exits.NO_INPUT:d} "{not_shared}"
{needs}CHECK
_ddp_code=0
srun "${{_ddp_step[@]}}" --kill-on-bad-exit=0 --wait=60 bash -c "$_ddp_check" check "$_ddp_token"{words} ||
  _ddp_code=$?
((_ddp_code == 0 || _ddp_stopped || _ddp_warned)) ||
  end "$_ddp_code" unavailable "not every node can run this job: see the lines above"
rm -f "$_ddp_token"

read -r -d '' _ddp_on_node <<'NODE' || true
{on_node}NODE
read -r -d '' _ddp_interrupt <<'INTERRUPT' || true
for _ in {{1..100}}; do # ddprun may not have started yet
  {interrupt} && exit
  [ ! -e "$DDP_RUN_DIR/node-$SLURM_NODEID/outcome.json" ] || exit 0
  sleep 0.1
done 2>/dev/null
exit 1
INTERRUPT
"""


def _start(plan: Plan, runtime: Runtime) -> str:
    words = ddprun_args(plan, deadline=False)
    exports = "".join(f"  export {name}={shlex.quote(value)}\n" for name, value in job_env.pack(plan.job.env).items())
    sharing = runtime.srun and f" \\\n    {runtime.srun}"
    return f"""\
_ddp_code={Exit.SAVED_TERM:d}
[[ $_ddp_signal == TERM ]] || _ddp_code={Exit.INTERRUPTED:d}
if ((!_ddp_stopped && !_ddp_warned)); then
  say "job $SLURM_JOB_ID, requeues so far: ${{SLURM_RESTART_COUNT:-0}}, nodes: $_ddp_nodes," \\
    "node 0 at $PET_MASTER_ADDR, files in $_ddp_run_dir"
{exports}  # With these options, srun kills no task: the ddprun processes agree on one outcome and then end.
  srun "${{_ddp_step[@]}}" --kill-on-bad-exit=0 --wait=0{sharing} \\
    {runtime.reader} -c "$_ddp_on_node" on_node {runtime.words} \\
    {shlex.join(words)} &
  _ddp_srun=$! _ddp_woken=1
  tell # if a signal arrived before srun started
  while ((_ddp_woken)); do # a signal interrupts wait, so wait again
    _ddp_woken=0 _ddp_code=0
    wait "$_ddp_srun" || _ddp_code=$?
  done
fi
"""


_END = """\
# Whether to requeue: after Slurm's warning, if an outcome allows a retry, or if ddprun was killed without an outcome.
retry() {{
  if grep -qs '"cause": "gave_up"' "$_ddp_run_dir"/node-*/outcome.json; then return 1; fi
  if ((_ddp_warned)) || grep -qs '"retry": true' "$_ddp_run_dir"/node-*/outcome.json; then return 0; fi
  ((_ddp_code == {exits.KILLED:d})) && ! compgen -G "$_ddp_run_dir/node-*/outcome.json" >/dev/null
}}
rm -f "$DDP_TARGETS_DIR/$DDP_RUN_ID".node-*.json # a killed ddprun leaves its file
if ((_ddp_code != 0 && !_ddp_stopped)) && [[ ${{ENVIRONMENT:-}} == BATCH ]] && retry; then
  if ((${{SLURM_RESTART_COUNT:-0}} >= {requeues})); then
    say "not requeued: its limit of {requeues} requeues is reached"
  elif scontrol requeue "$SLURM_JOB_ID"; then
    say "requeued"
    exit "$_ddp_code"
  fi
fi
rm -f "$_ddp_run_dir/secrets"
exit "$_ddp_code"
"""


def directives(job: JobSpec, options: SlurmOptions) -> tuple[str, ...]:
    """Return the options of sbatch in the script, without the prefix ``#SBATCH``."""
    lines = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes.replace(':', '-')}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.cpus or job.gpus}",
    ]
    if job.device != "cpu":
        count = f"{options.gpu_type}:{job.gpus}" if options.gpu_type else str(job.gpus)
        lines.append(f"--gres=gpu:{count}" if options.gpu_request == "gres" else f"--gpus-per-node={count}")
    if job.memory is not None:
        lines.append(f"--mem={size_bytes(job.memory) >> 20}M")
    if job.time_limit_s is not None:
        lines.append(f"--time={_time(job.time_limit_s)}")
    for name in ("partition", "account", "qos", "reservation", "constraint", "array"):
        if (value := getattr(options, name)) is not None:
            lines.append(f"--{name}={value}")
    if options.exclusive:
        lines.append("--exclusive")
    if job.min_nodes < job.max_nodes:
        lines.append("--no-kill")  # if a node is lost, the others continue without it
    lines += [
        f"--signal=B:USR1@{lead_s(job)}",
        "--requeue" if options.requeues else "--no-requeue",
        "--open-mode=append",
        *options.extra,
    ]
    return tuple(lines)


def _time(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
