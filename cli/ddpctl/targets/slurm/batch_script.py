"""Renders the batch script, which Slurm runs on the first node of a job.

The script sets the environment and starts ddprun on each node with one srun. It reads the numbers of nodes and GPUs
from Slurm's variables, so that a user can override them with options of sbatch. Without a container, ddprun.batch runs
the srun. With a container, ddprun is only inside of it, and the script itself handles signals and requeues the job.
slurm/README.md explains every line of the script.
"""

import shlex
from pathlib import PurePath

from ddpctl.job.launch_plan import Plan, ddprun_args, title
from ddpctl.job.secrets import make_store_secret
from ddpctl.job.spec import JobSpec, size_bytes
from ddpctl.targets.slurm.containers import Runtime, runtime_of
from ddpctl.targets.slurm.options import OF_SRUN, SlurmOptions, lead_s
from ddpwire import job_env, names
from ddpwire.exits import Exit
from ddpwire.run_files import CHECKPOINTS, STARTS, STEP, STORE_SECRET, TARGETS

# Variables that srun would read as its options, and that the script does not set with an option.
FOREIGN = """"${!SLURM_NTASKS@}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_@}" \\
  SLURM_{NPROCS,TASKS_PER_NODE,GPUS_PER_TASK,TRES_PER_TASK,CPUS_PER_GPU,GPU_BIND,DISTRIBUTION,HINT,LABELIO} \\
  SLURM_{OVERCOMMIT,EXACT,THREADS_PER_CORE,STDOUTMODE,STDERRMODE}"""

# sbatch copies variables of the job that submits this one. For the number of an array, scontrol prints all tasks.
FACTS = '''scontrol --oneliner show job "${SLURM_JOB_ID:?run this with sbatch}" | grep "^JobId=$SLURM_JOB_ID "'''


def render_script(plan: Plan, options: SlurmOptions) -> str:
    """Return the complete script. If ``plan.folder`` is relative, the script chooses its folders when it runs."""
    runtime = None if options.runtime == "none" else runtime_of(plan.job, options)
    start = _start_containers(plan, options, runtime) if runtime else _start(plan, options)
    settings = _settings(plan, options, runtime.setup if runtime else "")
    return "\n".join((_header(plan, options), settings, _rendezvous(plan.job), start))


def _header(plan: Plan, options: SlurmOptions) -> str:
    needs = "Needs a submit folder that all nodes share."
    if options.runtime == "none":
        where = "" if options.python else " (PYTHON=/path/to/venv/bin/python sbatch ...)"
        needs = f"{needs[:-1]}, and Python 3.11 with ddpctl[train] on each{where}.\n#"
    lines = "\n".join(f"#SBATCH {line}" for line in directives(plan.job, options))
    if not PurePath(plan.folder).is_absolute():
        lines += "\n#SBATCH --output=%x-%j.log"
    return f"""\
#!/usr/bin/env bash
# {title(plan.job)}, with one ddprun per node. Rendered by ddpctl render; its slurm/README.md explains
# every line. Options of sbatch override those below: sbatch --nodes=4 --time=2:00:00 --partition=NAME THIS_FILE
# {needs} You may edit the #SBATCH lines and the program at the end of the srun line.
{lines}
"""


def _settings(plan: Plan, options: SlurmOptions, setup: str) -> str:
    job = plan.job
    rendered = PurePath(plan.folder).is_absolute()
    task = "${SLURM_ARRAY_TASK_ID:+/task-$SLURM_ARRAY_TASK_ID}"
    name = "_ddp_run=${SLURM_JOB_NAME//[^A-Za-z0-9._-]/_}-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"
    run_dir = '_ddp_dir=$(realpath -ms -- "${RUN_DIR:-$SLURM_SUBMIT_DIR/runs/$_ddp_run}")'
    if rendered:
        name, run_dir = f"_ddp_run={plan.name}", f"_ddp_dir={shlex.quote(plan.folder)}"
    checkpoints = f"${names.RUN_DIR}/{CHECKPOINTS}"
    if rendered and (of := PurePath(plan.checkpoint_dir).parent) != PurePath(plan.folder):  # another run's checkpoints
        checkpoints = f"{shlex.quote(str(of))}{task}/{PurePath(plan.checkpoint_dir).name}"
    uid = f"export {names.RUN_UID}={plan.uid}${{SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}}\n" if plan.uid else ""
    store = shlex.quote(job.checkpoint_dir or "") + ("" if rendered else "/$_ddp_run")
    store = f"export {names.CHECKPOINT_STORE}={store}{task}\n" if job.checkpoint_dir else ""
    targets = shlex.quote(options.prometheus) if options.prometheus else f"${{_ddp_dir%/*}}/{TARGETS}"
    launcher = f" {names.LAUNCHER}=slurm"
    launcher += "" if job.device == "auto" else f" {names.DEVICE}={job.device}"
    launcher += "" if options.runtime == "none" else f" {names.IMAGE}={shlex.quote(job.image)}"
    modules = "".join(f"module load {shlex.quote(module)}\n" for module in options.modules)
    if modules:  # the shell functions of Environment Modules may fail under set -eu
        modules = f"set +eu\n{modules}set -eu\n"
    env = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in job_env.pack(job.env).items())
    folder, make = f'"${names.RUN_DIR}"', f'mkdir -p "${names.TARGETS_DIR}"'
    make_targets = f"{make} || {{ {names.TARGETS_DIR}=${names.RUN_DIR}/{TARGETS} && {make}; }}"
    make_folder = make_store_secret(folder, f'"${names.CHECKPOINT_DIR}"')
    start = '"$_ddp_job" "${SLURM_RESTART_COUNT:-0}" "$_ddp_requeues" "${SLURM_JOB_START_TIME:--1}"'
    return f"""\
set -euo pipefail
_ddp_facts=$({FACTS}) || exit {Exit.UNAVAILABLE:d} # no answer
[[ $_ddp_facts == *" ArrayJobId="* ]] || unset "${{!SLURM_ARRAY_@}}" # of the job that has submitted this one
# The folder of the run, which all nodes share, with a secret for its nodes, and without files of an earlier start.
{name} _ddp_requeues={options.requeues}
{run_dir}
export {names.RUN_ID}=$_ddp_run${{SLURM_ARRAY_TASK_ID:+.task-$SLURM_ARRAY_TASK_ID}}{launcher}
export {names.TARGETS_DIR}={targets} {names.RUN_DIR}=$_ddp_dir{task}
export {names.CHECKPOINT_DIR}={checkpoints} {names.SECRET_FILE}=${names.RUN_DIR}/{STORE_SECRET}
{uid}{store}{make_folder} || exit {Exit.CANNOT_WRITE:d} # cannot write
{make_targets} || exit {Exit.CANNOT_WRITE:d} # for Prometheus
rm -f {folder}/node-*/{{node,outcome}}.json {folder}/{STEP}
# This start: the job (@PID:JOB unless Slurm has set ENVIRONMENT=BATCH), its requeues, their limit, the time (-1: now).
[[ $_ddp_facts != *" Restarts=0 "* ]] || {{ unset SLURM_RESTART_COUNT && rm -f {folder}/{STARTS}; }}
_ddp_job=${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}} && [[ ${{ENVIRONMENT:-}} == BATCH ]] || _ddp_job=@$$:$_ddp_job
printf 'slurm %s %d %d %(%s)T\\n' {start} >>{folder}/{STARTS}
{modules}{setup}{_secrets(job)}{env}"""


def _secrets(job: JobSpec) -> str:
    if not job.secrets:
        return ""
    file = f"${names.RUN_DIR}/secrets"
    missing = "".join(
        f"[[ -n ${{{name}+x}} ]] || "
        f'{{ echo "slurm: set the secret {name} and export it before sbatch" >&2; exit {Exit.CONFIG:d}; }}\n'
        for name in job.secrets
    )
    return f"""\
if [[ -e {file} ]]; then # written by ddpctl launch
  [[ -O {file} && $(stat -c %a "{file}") == 600 ]] ||
    {{ echo "slurm: {file} must be your own file, with mode 600" >&2; rm -f "{file}"; exit {Exit.CONFIG:d}; }}
  source "{file}" # shellcheck disable=SC1090,SC1091
fi
{missing}"""


def _rendezvous(job: JobSpec) -> str:
    fixed = job.ranks is not None or job.device == "cpu"  # otherwise one rank per GPU that Slurm has allocated
    ranks = str(job.local_world_size) if fixed else f"${{SLURM_GPUS_ON_NODE:-${{SLURM_GPUS_PER_NODE:-{job.max_gpus}}}}}"
    more = f" {names.NODE_MASTER_PORT}={job.port}" if job.port else ""
    nodes, address = "SLURM_JOB_NUM_NODES", f"${names.NODE_MASTER_ADDR}"
    if job.min_nodes < job.max_nodes:
        more += f" {names.NNODES}=$(({nodes} < {job.min_nodes} ? {nodes} : {job.min_nodes})):${nodes}"
    return f"""\
# Unset variables that sbatch may have copied from another job or from the user: srun and ddprun would use them.
unset "${{!PET_@}}" "${{!SQUEUE_@}}" "${{!SCANCEL_@}}" "${{!SCONTROL_@}}" {FOREIGN} \
{names.LIFELINE_FD} {names.PROMETHEUS_MULTIPROC_DIR}
# torchrun's variables: the address of node 0, which a container may be unable to find, and the number of ranks.
_ddp_head=$(scontrol show node "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)" |
  sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p') || exit {Exit.UNAVAILABLE:d}
read -r {names.NODE_MASTER_ADDR} _ < <(getent ahostsv4 "$_ddp_head" || getent ahosts "$_ddp_head") || true
[[ {address} != 127.* ]] || read -r {names.NODE_MASTER_ADDR} _ < <(hostname -I) || true # not a loopback address
_ddp_ranks={ranks} && export {names.NODE_MASTER_ADDR} {names.NPROC_PER_NODE}=${{_ddp_ranks##*:}}{more}
echo "slurm: job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, node 0 at {address}, files in ${names.RUN_DIR}" >&2
"""


# With --kill-on-bad-exit=0 and --wait=0, srun kills no task: the ddprun processes agree on one outcome and then end.
# srun does not inherit --cpus-per-task from sbatch (since Slurm 22.05).
_SRUN = """\
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --export=ALL --input=none \\
  ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --mpi=none --kill-on-bad-exit=0 --wait=0"""


def _srun(options: SlurmOptions) -> str:
    own = [line for line in options.extra if line[2:].partition("=")[0] in OF_SRUN]
    return " ".join((_SRUN, *map(shlex.quote, own)))


def _start(plan: Plan, options: SlurmOptions) -> str:
    python = shlex.quote(options.python) if options.python else '"${PYTHON:-python3}"'
    return f"""\
# ddprun.batch checks the nodes, runs this srun, passes signals on to ddprun, and requeues the job. With the last two
# options, srun ends no task itself, because all ddpruns agree on one exit code.
exec {python} -P -m ddprun.batch --requeues="$_ddp_requeues" \\
  {_srun(options)} \\
  {python} -P -m ddprun \\
  {shlex.join(ddprun_args(plan, deadline=False))}
"""


def _start_containers(plan: Plan, options: SlurmOptions, runtime: Runtime) -> str:
    check = f'"${{_ddp_srun[@]}}" {runtime.needs} >/dev/null || exit {Exit.UNAVAILABLE:d} # every node must have it\n'
    stop = f'[[ -s ${names.RUN_DIR}/{STEP} ]] && scancel --signal=TERM "$SLURM_JOB_ID.$(<"${names.RUN_DIR}/{STEP}")"'
    node = f"read -r -d '' _ddp_node <<'NODE' || true # for each node\n{runtime.node}NODE\n"
    retries = "|".join(f"{code:d}" for code in Exit if code.retry)
    own = f'{FACTS} | grep " Restarts=${{SLURM_RESTART_COUNT:-0}} " >/dev/null'  # Slurm itself has not requeued the job
    end = f' && exit "$_ddp_code"\n! {own} || rm -f "${names.RUN_DIR}/secrets"' if plan.job.secrets else ""
    return f"""\
_ddp_srun=({_srun(options)}) # it ends no task itself
{check if runtime.needs else ""}{node if runtime.node else ""}\
# shellcheck disable=SC2329 # called by traps. SIGTERM goes to the step (ddprun writes its number): srun would kill it.
_ddp_stop() {{ while kill -0 $! && ! {{ {stop}; }}; do sleep 1; done 2>/dev/null; }}
trap _ddp_stop USR1 # Slurm's warning
trap '_ddp_stopped=1; _ddp_stop' USR2 INT # ddpctl stop; Ctrl-C in an allocation
trap '_ddp_stopped=1' TERM # scancel: Slurm itself signals the step
"${{_ddp_srun[@]}}" {runtime.command} \\
  {shlex.join(ddprun_args(plan, deadline=False))} &
while kill -0 $! 2>/dev/null; do sleep 0.5 || true; done # a wait that a signal interrupts may lose srun's exit code
wait $! && _ddp_code=0 || _ddp_code=$?
# A new start may help if ranks were killed (137), saved on request (138, 140, 143), missed a node (142) or hung (144).
[[ $_ddp_code =~ ^({retries})$ && ! ${{_ddp_stopped:-}} && ${{ENVIRONMENT:-}} == BATCH ]] &&
  ((${{SLURM_RESTART_COUNT:-0}} < _ddp_requeues)) && scontrol requeue "$SLURM_JOB_ID" && echo "slurm: requeued" >&2{end}
exit "$_ddp_code"
"""


def directives(job: JobSpec, options: SlurmOptions) -> tuple[str, ...]:
    """Return the options of sbatch in the script, without the prefix ``#SBATCH``."""
    lines = [
        f"--job-name={job.name}",
        f"--nodes={job.max_machines if job.spares else job.nodes.replace(':', '-')}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.cpus or job.max_gpus}",
    ]
    extra = [*options.extra]
    if job.device != "cpu":
        count = f"{options.gpu_type}:{job.max_gpus}" if options.gpu_type else str(job.max_gpus)
        if options.gpu_request == "gres":  # sbatch takes only the last --gres
            more = [line.removeprefix("--gres=") for line in extra if line.startswith("--gres=")]
            extra = [line for line in extra if not line.startswith("--gres=")]
            lines.append(f"--gres={','.join((f'gpu:{count}', *more))}")
        else:
            lines.append(f"--gpus-per-node={count}")
    if job.memory is not None:
        lines.append(f"--mem={size_bytes(job.memory) >> 20}M")
    if job.time_limit_s is not None:
        days, rest = divmod(job.time_limit_s, 86400)
        clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
        lines.append(f"--time={f'{days}-' if days else ''}{clock}")
    for name in ("partition", "account", "qos", "reservation", "constraint", "array"):
        if (value := getattr(options, name)) is not None:
            lines.append(f"--{name}={value}")
    if options.exclusive:
        lines.append("--exclusive")
    if job.min_nodes < job.max_machines:
        lines.append("--no-kill")  # if a node is lost, the others continue without it
    lines += [
        f"--signal=B:USR1@{lead_s(job)}",
        "--requeue" if options.requeues else "--no-requeue",
        "--open-mode=append",
        *extra,
    ]
    return tuple(lines)
