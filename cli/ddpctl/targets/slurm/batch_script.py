"""Renders the batch script, which Slurm runs on the first node of a job, or ddpctl in an allocation.

The script sets the environment and starts ddprun on each node with one srun. It reads the numbers of nodes and GPUs
from Slurm's variables, so that a user can override them with options of sbatch. Without a container, ddprun.batch runs
the srun. With a container, ddprun is only inside of it, and the script itself handles signals and requeues the job.
slurm/README.md explains every line of the script.

In a container, the project is at /workspace, and the run's folders have the same paths as on the node. The container
uses the node's network. Each variable that a container needs is passed by its name. So its value overrides the image's
value, and does not appear on a command line.
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from ddpctl.job.launch_plan import Plan, ddprun_args, title
from ddpctl.job.secrets import make_store_secret
from ddpctl.job.spec import JobSpec, size_bytes
from ddpctl.targets.slurm.options import OF_SRUN, SlurmOptions, lead_s
from ddpwire import job_env, names
from ddpwire.exits import Exit
from ddpwire.run_files import CHECKPOINTS, STARTS, STEP, STORE_SECRET, TARGETS

# Variables that srun would read as its options. The script gives srun what it needs itself.
FOREIGN = """"${!SLURM_NTASKS@}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_@}" \\
  SLURM_{NPROCS,TASKS_PER_NODE,GPUS_PER_TASK,TRES_PER_TASK,CPUS_PER_GPU,GPU_BIND,DISTRIBUTION,HINT,LABELIO} \\
  SLURM_{OVERCOMMIT,EXACT,THREADS_PER_CORE,STDOUTMODE,STDERRMODE}"""

# sbatch copies variables of the job that submits this one, so scontrol gives the facts. For the number of an array, it
# prints all tasks, of which grep takes one. With the blank, 12 is not 123.
FACTS = '''scontrol --oneliner show job "${SLURM_JOB_ID:?run this with sbatch}" | grep "^JobId=$SLURM_JOB_ID "'''

WORKSPACE = "/workspace"
OWN_MOUNTS = (
    f"$PWD:{WORKSPACE}",
    *(f"${place}:${place}" for place in (names.RUN_DIR, names.CHECKPOINT_DIR, names.TARGETS_DIR)),
)
BREAK = " \\\n  "
WIDTH = 115  # with the indent and the backslash, at most 120 columns


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The parts of a batch script that differ between runtimes."""

    setup: str = ""  # commands for the first node
    needs: str = ""  # a command that fails on a node that cannot start a container
    node: str = ""  # a script for each node, which starts ddprun with its arguments
    command: str = 'bash -c "$_ddp_node" node'  # the rest of the srun line: options of srun, and the program


def render_script(plan: Plan, options: SlurmOptions) -> str:
    """Return the complete script. If ``plan.folder`` is relative, the script chooses its folders when it runs."""
    render = {"pyxis": _pyxis, "apptainer": _apptainer}.get(options.runtime, _engine)
    runtime = None if options.runtime == "none" else render(plan.job, options)
    start = _start_containers(plan, options, runtime) if runtime else _start(plan, options)
    settings = _settings(plan, options, runtime.setup if runtime else "")
    return "\n".join((_header(plan, options), settings, _rendezvous(plan.job), start))


def _header(plan: Plan, options: SlurmOptions) -> str:
    needs = "Needs a submit folder that all nodes share."
    if options.runtime == "none":
        where = "" if options.python else " (PYTHON=/path/to/venv/bin/python sbatch ...)"
        needs = f"{needs[:-1]}, and Python 3.11 with ddpctl[train] on each{where}.\n#"
    lines = "\n".join(f"#SBATCH {line}" for line in directives(plan.job, options))
    if not PurePath(plan.folder).is_absolute():  # else ddpctl launch gives sbatch the log
        lines += "\n#SBATCH --output=%x-%j.log"
        lines += f"\n#SBATCH --chdir={shlex.quote(options.workdir)}" if options.workdir else ""
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
    # A task of an array is a run of its own. sbatch --job-name may give characters that no run's name has.
    task = "${SLURM_ARRAY_TASK_ID:+/task-$SLURM_ARRAY_TASK_ID}"
    name = "_ddp_run=${SLURM_JOB_NAME//[^A-Za-z0-9._-]/_}-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"
    # --: a path may begin with a dash. -m: the folder need not exist yet. -s: symbolic links stay as the user wrote
    # them.
    run_dir = '_ddp_dir=$(realpath -ms -- "${RUN_DIR:-$SLURM_SUBMIT_DIR/runs/$_ddp_run}")'
    if options.runs:
        run_dir = f"RUN_DIR=${{RUN_DIR:-{shlex.quote(options.runs)}/$_ddp_run}}\n{run_dir}"
    if rendered:
        name, run_dir = f"_ddp_run={plan.name}", f"_ddp_dir={shlex.quote(plan.folder)}"
    checkpoints = f"${names.RUN_DIR}/{CHECKPOINTS}"
    if rendered and (of := PurePath(plan.checkpoint_dir).parent) != PurePath(plan.folder):  # another run's checkpoints
        checkpoints = f"{shlex.quote(str(of))}{task}/{PurePath(plan.checkpoint_dir).name}"
    uid = f"export {names.RUN_UID}={plan.uid}${{SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}}\n" if plan.uid else ""
    store = shlex.quote(job.checkpoint_dir or "") + ("" if rendered else "/$_ddp_run")
    store = f"export {names.CHECKPOINT_STORE}={store}{task}\n" if job.checkpoint_dir else ""
    # By default beside all runs, so that Prometheus reads one folder. If it cannot be made: in the run's own.
    targets = shlex.quote(options.prometheus) if options.prometheus else f"${{_ddp_dir%/*}}/{TARGETS}"
    launcher = f" {names.LAUNCHER}=slurm"
    launcher += "" if job.device == "auto" else f" {names.DEVICE}={job.device}"
    launcher += "" if options.runtime == "none" else f" {names.IMAGE}={shlex.quote(job.image)}"
    modules = "".join(f"module load {shlex.quote(module)}\n" for module in options.modules)
    if modules:  # the shell functions of Environment Modules may fail under set -eu
        modules = f"set +eu\n{modules}set -eu\n"
    # Packed, because bash itself uses some of the names (job_env.py).
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
    # bash executes the file, so nobody else may have written it; one that others can read is deleted at once.
    # ${NAME+x}: a secret may be empty, and under set -u, an unset variable would end the script without this message.
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
    # The shell of salloc has no SLURM_GPUS_ON_NODE.
    # SLURM_GPUS_PER_NODE may be TYPE:NUMBER; the script takes what follows the colon.
    ranks = str(job.local_world_size) if fixed else f"${{SLURM_GPUS_ON_NODE:-${{SLURM_GPUS_PER_NODE:-{job.max_gpus}}}}}"
    more = f" {names.NODE_MASTER_PORT}={job.port}" if job.port else ""  # else ddprun derives it from the job's number
    # IPv4 comes first, because the check for a loopback address knows only 127.*. If the address stays empty, ddprun
    # resolves the name of the first node. Without || true, set -e would end the script, as read fails at end of file.
    nodes, address = "SLURM_JOB_NUM_NODES", f"${names.NODE_MASTER_ADDR}"
    if job.min_nodes < job.max_nodes:  # sbatch --nodes may give fewer nodes than the minimum
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
# srun does not inherit --cpus-per-task from sbatch (since Slurm 22.05). The start of MPI would take time.
_SRUN = """\
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --export=ALL --input=none \\
  ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --mpi=none --kill-on-bad-exit=0 --wait=0"""


def _srun(options: SlurmOptions) -> str:
    # Options of sbatch that srun would read from variables, which the script unsets (FOREIGN).
    own = [line for line in options.extra if line[2:].partition("=")[0] in OF_SRUN]
    return " ".join((_SRUN, *map(shlex.quote, own)))


def _start(plan: Plan, options: SlurmOptions) -> str:
    python = shlex.quote(options.python) if options.python else '"${PYTHON:-python3}"'
    # With exec, the signals for the batch script reach ddprun.batch. With -P, no file of the project hides a module.
    # Slurm enforces the time limit, so ddprun gets no deadline.
    return f"""\
# ddprun.batch checks the nodes, runs this srun, passes signals on to ddprun, and requeues the job. With the last two
# options, srun ends no task itself, because all ddpruns agree on one exit code.
exec {python} -P -m ddprun.batch --requeues="$_ddp_requeues" \\
  {_srun(options)} \\
  {python} -P -m ddprun \\
  {shlex.join(ddprun_args(plan, deadline=False))}
"""


def _start_containers(plan: Plan, options: SlurmOptions, runtime: Runtime) -> str:
    # Before the ranks start, else the other nodes would wait for the missing one. What the command prints does not
    # matter. Its errors go to the job's log.
    check = f'"${{_ddp_srun[@]}}" {runtime.needs} >/dev/null || exit {Exit.UNAVAILABLE:d} # every node must have it\n'
    # scancel takes "JOB." for the step 0, so the file must not be empty.
    stop = f'[[ -s ${names.RUN_DIR}/{STEP} ]] && scancel --signal=TERM "$SLURM_JOB_ID.$(<"${names.RUN_DIR}/{STEP}")"'
    # read looks for a NUL byte, so it reads everything, and fails at end of file.
    node = f"read -r -d '' _ddp_node <<'NODE' || true # for each node\n{runtime.node}NODE\n"
    retries = "|".join(f"{code:d}" for code in Exit if code.retry)
    own = f'{FACTS} | grep " Restarts=${{SLURM_RESTART_COUNT:-0}} " >/dev/null'  # Slurm itself has not requeued the job
    # A requeued job needs its secrets again, so it exits before the rm.
    end = f' && exit "$_ddp_code"\n! {own} || rm -f "${names.RUN_DIR}/secrets"' if plan.job.secrets else ""
    # In the script: _ddp_stop drops the errors of scancel, because it tries again until the step has started, or srun
    # has ended. A signal to the process group also ends the sleep. Without || true, set -e would then end the script.
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
    # Spares are nodes of the job from the start. sbatch writes a range as MIN-MAX.
    lines = [
        f"--job-name={job.name}",
        f"--nodes={job.max_machines if job.spares else job.nodes.replace(':', '-')}",
        "--ntasks-per-node=1",  # with one for each GPU, a rank sees only its own GPU: NCCL cannot use NVLink
        f"--cpus-per-task={job.cpus or job.max_gpus}",  # at least one for each rank
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
        lines.append(f"--mem={size_bytes(job.memory) >> 20}M")  # Slurm's M is MiB
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
        # B: only the batch script, which asks the ranks to save and then requeues the job.
        f"--signal=B:USR1@{lead_s(job)}",
        "--requeue" if options.requeues else "--no-requeue",
        # A requeued job continues the log of its first start.
        "--open-mode=append",
        *extra,
    ]
    return tuple(lines)


# The parts that depend on the container runtime (pyxis, apptainer, podman, docker)


def variables(job: JobSpec, *more: str) -> str:
    """Return a shell command that prints the names of the variables to pass to a container.

    Only pyxis and apptainer pass CUDA_VISIBLE_DEVICES. A container of podman or docker gets the job's GPUs as devices,
    and numbers them from 0.
    """
    others = "|".join((*more, *job.secrets))
    return f"compgen -e | grep -xE '(DDP|PET|SLURM|NCCL|UCX)_.*{f'|{others}' if others else ''}'"


def mounts(job: JobSpec) -> tuple[str, ...]:
    """Return all mounts of a container, each quoted for bash. Bash expands variables only in ddpctl's own mounts."""
    return (*(f'"{mount}"' for mount in OWN_MOUNTS), *map(shlex.quote, job.mounts))


def lines(arguments: Iterable[str]) -> tuple[str, ...]:
    """Join words with blanks into lines of at most ``WIDTH`` characters."""
    made = [""]
    for word in arguments:
        if made[-1] and len(made[-1]) + len(word) > WIDTH:
            made.append("")
        made[-1] += f" {word}" if made[-1] else word
    return tuple(made)


def _pyxis(job: JobSpec, options: SlurmOptions) -> Runtime:
    shared = f'"{",".join(OWN_MOUNTS)}"'
    shared += shlex.quote("," + ",".join(job.mounts)) if job.mounts else ""
    # enroot's format of ghcr.io/a/b:1 is ghcr.io#a/b:1. Without a dot or port, the first part is no registry.
    image = re.sub(r"^(localhost|[^/]*[.:][^/]*)/", r"\1#", job.image)
    options_of_srun = (
        f"--container-image={shlex.quote(image)} --container-workdir={WORKSPACE}",
        f"--container-mounts={shared}",
        f'--container-env="$({variables(job, "CUDA_VISIBLE_DEVICES")} | paste -s -d ,)"',
        # The entrypoint of the image would start a second ddprun, as the program of its ranks.
        *lines(("--no-container-mount-home", "--no-container-entrypoint", *map(shlex.quote, options.runtime_args))),
    )
    return Runtime(command=BREAK.join((*options_of_srun, "ddprun")))


def _apptainer(job: JobSpec, options: SlurmOptions) -> Runtime:
    setup = "_ddp_engine=$(command -v apptainer || command -v singularity) || "
    setup += f'{{ echo "slurm: no apptainer here" >&2; exit {Exit.UNAVAILABLE:d}; }}\n'
    setup += f"export _ddp_engine _ddp_image={_sif(job, options)}\n"
    source = shlex.quote(f"docker://{job.image}")
    # mv: no job starts a part of an image. During the wait for the lock, another job may have pulled it. After an hour,
    # or without locks, two jobs may pull: the later mv replaces the file.
    if not options.sif:  # --force: an earlier start of this job may have left the file
        setup += f"""\
# Pull the image once, into a folder that all nodes share. One job at a time, if the filesystem has locks.
[[ -s $_ddp_image ]] || {{ _ddp_new=$_ddp_image.$SLURM_JOB_ID && mkdir -p "${{_ddp_image%/*}}" && (
  flock --wait 3600 8 || true; [[ ! -s $_ddp_image ]] || exit 0; trap 'rm -f "$_ddp_new"' EXIT
  "$_ddp_engine" pull --force "$_ddp_new" {source} && mv -f "$_ddp_new" "$_ddp_image"
) 8>"$_ddp_image.lock"; }} || exit {Exit.UNAVAILABLE:d}
"""
    start = (*_apptainer_options(job, options, mounts(job)), '"$_ddp_image" ddprun "$@"')
    return Runtime(
        setup=setup,
        needs=f'ls "${names.RUN_DIR}" "$_ddp_image"',
        node=f"""\
for _ddp_name in $({variables(job, "CUDA_VISIBLE_DEVICES")}); do # override the image's variables
  export "APPTAINERENV_$_ddp_name=${{!_ddp_name}}" "SINGULARITYENV_$_ddp_name=${{!_ddp_name}}"
done
{BREAK.join(lines(('exec "$_ddp_engine" exec', *start)))}
""",
    )


def _apptainer_options(job: JobSpec, options: SlurmOptions, mounts: Iterable[str]) -> tuple[str, ...]:
    # Neither the node's variables nor packages in the home folder (~/.local) may change what runs.
    flags = ("--cleanenv", "--no-home", *([] if job.device == "cpu" else ["--nv"]), f"--pwd {WORKSPACE}")
    return (*flags, *(f"--bind {mount}" for mount in mounts), *map(shlex.quote, options.runtime_args))


def _sif(job: JobSpec, options: SlurmOptions) -> str:
    if options.sif:
        return shlex.quote(options.sif)
    return f"${{DDPCTL_IMAGES:-$HOME/.cache/ddpctl/images}}/{re.sub('[^A-Za-z0-9.-]', '_', job.image)}.sif"


def beside(
    job: JobSpec, options: SlurmOptions, *, number: str, node: int, workdir: str, run_dir: str,
    argv: tuple[str, ...], tty: bool,
) -> tuple[str, ...]:  # fmt: skip
    """Return the command line that runs ``argv`` where a node's ranks run. An empty ``argv`` stands for a shell."""
    argv = argv or ("bash",)
    match options.runtime:
        case "docker" | "podman":
            env = (f"--env={name}={value}" for name, value in job.env.items())
            return (options.runtime, "exec", "-it" if tty else "-i", *env, f"ddpctl-{number}-{node}", *argv)
        case "pyxis":  # its containers have no name, but their processes have PIDs on the node
            step = f"$0/{STEP}"  # scontrol takes "JOB." for the step 0
            # The columns are PID, JOBID, STEPID, LOCALID and GLOBALID. A node has one task, so its LOCALID is 0.
            find = f'[[ -s {step} ]] && scontrol listpids "$SLURM_JOB_ID.$(<{step})" | awk \'$4 == "0" {{print $1}}\''
            return ("bash", "-c", f'exec enroot exec "$({find})" "$@"', run_dir, *argv)
        case "apptainer":  # its containers have no name either: another one, with the same image and folders
            arguments = _apptainer_options(job, options, map(shlex.quote, job.mounts))
            text = f'''\
_ddp_engine=$(command -v apptainer || command -v singularity) _ddp_image={_sif(job, options)}
exec "$_ddp_engine" exec {" ".join(arguments)} \\
  --bind "$0:{WORKSPACE}" --bind "$1:$1" "$_ddp_image" "${{@:2}}"'''
            return ("bash", "-c", text, workdir, run_dir, *argv)
    return argv


def _engine(job: JobSpec, options: SlurmOptions) -> Runtime:
    """Return the parts of the batch script that depend on podman or docker.

    A container is not a child process of its srun task, and does not end with the task. So ddprun reads a pipe from
    the task. When the task ends, the pipe is closed, and ddprun saves and stops.
    """
    engine = options.runtime
    name = '"ddpctl-$SLURM_JOB_ID-$SLURM_NODEID"'
    gpus = {
        "podman": "${SLURM_STEP_GPUS:+$(printf -- '--device=nvidia.com/gpu=%s ' ${SLURM_STEP_GPUS//,/ })}",
        "docker": '${SLURM_STEP_GPUS:+--gpus="\\"device=$SLURM_STEP_GPUS\\""}',
    }[engine]
    infiniband = "$([ ! -d /dev/infiniband ] || echo --device=/dev/infiniband --ulimit=memlock=-1)"  # NCCL locks memory
    # HOME: the container's user is that of the node, and may be unable to write to the image's home folder. The size
    # 8Gi is 8g for docker. --interactive connects stdin, which is the pipe.
    # --init forwards signals. --env-file has only names, so no value is visible in the arguments of the engine.
    arguments = (
        f"exec {engine} run --name={name}", "--rm", "--init", "--interactive", "--network=host",
        '--label="ddpctl.run=$DDP_RUN_ID"', f"--shm-size={job.shm_size[:-1].lower()}", "--cap-drop=ALL",
        "--security-opt=no-new-privileges", f"--workdir={WORKSPACE}", *_SHARE[engine],
        *([] if job.device == "cpu" else [gpus, infiniband]), f"--env-file=<({variables(job)})",
        f"--env=HOME=/tmp --env={names.LIFELINE_FD}=3", *(f"--volume={mount}" for mount in mounts(job)),
        *map(shlex.quote, options.runtime_args), "--entrypoint=sh", shlex.quote(job.image),
    )  # fmt: skip
    # The task's pipe becomes descriptor 3, so that the ranks do not read from it.
    program = '-c \'exec 3<&0 </dev/null; exec ddprun "$@"\' ddprun "$@"'
    # Usually no container is left from an earlier start, so the errors of rm do not matter.
    # tail ignores the SIGTERM that asks a step to save: the pipe must close only when the task ends.
    return Runtime(
        setup=_MEMORY if engine == "docker" else "",
        needs=f"{engine} version",
        node=f"""\
{engine} rm --force {name} >/dev/null 2>&1 # left from an earlier start
# Variables are passed by name. If Slurm kills this task, the pipe to the container closes, and ddprun saves and ends.
{BREAK.join((*lines(arguments), program))} < <(trap '' TERM && exec tail --follow --pid=$$ /dev/null)
""",
    )


_MEMORY = """\
_ddp_memory=${_ddp_facts##* MinMemory} && _ddp_memory=${_ddp_memory%% *} # Node=8G or CPU=500M; 0: no limit
_ddp_memory=${_ddp_memory/CPU=/SLURM_CPUS_ON_NODE*} && export _ddp_memory=${_ddp_memory#Node=}
"""
_MEMORY_OF_NODE = '"$((${_ddp_memory%[A-Z]}))${_ddp_memory##*[0-9]}"'
# The user in the container, and its share of the node. A container of docker is outside the job's cgroup, so it needs
# the job's limits; 0: no limit. With crun, podman's container can stay in the job's cgroup, and so has its limits.
_SHARE = {
    "docker": ('--user="$(id -u):$(id -g)" --cpus="${SLURM_CPUS_PER_TASK:-0}"', f"--memory={_MEMORY_OF_NODE}"),
    "podman": (
        "--userns=keep-id",
        "$(podman info --format '{{.Host.OCIRuntime.Name}}' | grep -qx crun && echo --cgroups=disabled)",
    ),
}
