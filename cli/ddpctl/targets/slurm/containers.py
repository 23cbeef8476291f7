"""Renders the parts of the batch script that depend on the container runtime (none, pyxis, apptainer, podman, docker).

In a container, the project is at /workspace, and the run's folders have the same paths as on the node. The container
uses the node's network. Each variable that a container needs is passed by its name. So its value overrides the image's
value, and does not appear on a command line.
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from ddpctl.job.launch_plan import CHECK_PYTHON
from ddpctl.job.spec import JobSpec
from ddpctl.targets.slurm.options import SlurmOptions
from ddpwire import names, run_files
from ddpwire.exits import Exit

WORKSPACE = "/workspace"
HANDED_IN = (
    names.NNODES, names.NPROC_PER_NODE, names.NODE_MASTER_ADDR, names.NODE_MASTER_PORT, names.RUN_ID, names.RUN_UID,
    names.RUN_DIR, names.CHECKPOINT_DIR, names.SECRET_FILE, names.TARGETS_DIR, names.LAUNCHER, names.DEVICE,
    names.IMAGE, "SLURM_JOB_ID", "SLURM_JOB_USER", "SLURM_JOB_ACCOUNT", "SLURM_NNODES", "SLURM_STEP_ID", "SLURM_NODEID",
    "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "CUDA_VISIBLE_DEVICES", names.CHECKPOINT_STORE,
)  # fmt: skip
OWN_MOUNTS = (
    f"$_ddp_workdir:{WORKSPACE}",
    *(f"{place}:{place}" for place in ("$_ddp_run_dir", f"${names.CHECKPOINT_DIR}", f"${names.TARGETS_DIR}")),
)
BREAK = " \\\n    "
WIDTH = 96
PLAIN = """\
[ "$SLURM_PROCID" != 0 ] || echo "$SLURM_STEP_ID" >"$DDP_RUN_DIR/step"
"""
# The PID that ddprun has recorded is valid on the node even if ddprun runs in a container of pyxis or apptainer.
INTERRUPT = """kill -INT "$(sed -n 's/^ "pid": \\([0-9]*\\),.*/\\1/p' "$DDP_RUN_DIR/node-$SLURM_NODEID/node.json")\""""
PULL_S = 3600
# A container of docker needs its own memory limit, because the daemon starts it outside the job's cgroup.
_MEMORY = """\
_ddp_memory=${SLURM_MEM_PER_NODE:-$((${SLURM_MEM_PER_CPU:-0} * ${SLURM_CPUS_ON_NODE:-0}))}
export _ddp_memory
"""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The parts of a batch script that differ between runtimes."""

    setup: str = ""  # commands for the first node, before everything else
    needs: str = ""  # commands for every node, which check what the runtime needs
    on_node: str  # commands of each srun task, which start ddprun
    srun: str = ""  # more options of srun
    words: str  # the beginning of the command line that starts ddprun
    reader: str = "bash"  # the shell that runs on_node
    interrupt: str = INTERRUPT  # a command for a node, which sends SIGINT to ddprun


def handed_in(job: JobSpec) -> tuple[str, ...]:
    """Return the names of the variables to pass to a container."""
    carried = (names.JOB_ENV,) if job.env else ()
    return tuple(dict.fromkeys((*HANDED_IN, *carried, *job.secrets)))


def mounts(job: JobSpec) -> tuple[str, ...]:
    """Return all mounts of a container, each quoted for bash. Bash expands variables only in ddpctl's own mounts."""
    return (*(f'"{mount}"' for mount in OWN_MOUNTS), *map(shlex.quote, job.mounts))


def lines(words: Iterable[str]) -> tuple[str, ...]:
    """Join words with blanks into lines of at most ``WIDTH`` characters."""
    made = [""]
    for word in words:
        if made[-1] and len(made[-1]) + len(word) > WIDTH:
            made.append("")
        made[-1] += f" {word}" if made[-1] else word
    return tuple(made)


def runtime_of(job: JobSpec, options: SlurmOptions) -> Runtime:
    """Return the parts of the batch script that depend on the job's container runtime."""
    return {"none": _none, "pyxis": _pyxis, "apptainer": _apptainer, "podman": engine_of, "docker": engine_of}[
        options.runtime
    ](job, options)


def _none(_: JobSpec, options: SlurmOptions) -> Runtime:
    given = shlex.quote(options.python) if options.python else "${PYTHON:-python3}"
    key = "the key python of the target" if options.python else "PYTHON"
    wanted = f"set {key} to a Python that has torch and ddpctl[train] on every node"
    return Runtime(
        setup=f"_ddp_python={given}\nexport _ddp_python\n",
        needs=f"""\
_ddp_found=$("$_ddp_python" -c {shlex.quote(CHECK_PYTHON)} 2>&1) ||
  lacks 66 "$_ddp_python: ${{_ddp_found##*$'\\n'}}: {wanted}"
""",
        on_node=f'{PLAIN}exec "$@"\n',
        words='"$_ddp_python" -P -m ddprun',
    )


def _pyxis(job: JobSpec, options: SlurmOptions) -> Runtime:
    shared = f'"{",".join(OWN_MOUNTS)}"'
    shared += shlex.quote("," + ",".join(job.mounts)) if job.mounts else ""
    options_of_srun = (
        f"--container-image={shlex.quote(enroot_image(job.image))} --container-workdir={WORKSPACE}",
        f"--container-mounts={shared}",
        *lines(("--no-container-mount-home", "--no-container-entrypoint", *map(shlex.quote, options.runtime_args))),
        f"--container-env={','.join(handed_in(job))}",
    )
    return Runtime(on_node=f'{PLAIN}exec "$@"\n', srun=BREAK.join(options_of_srun), words="ddprun", reader="sh")


def enroot_image(image: str) -> str:
    """Return an image's name in enroot's format: ``ghcr.io/a/b:1`` becomes ``ghcr.io#a/b:1``."""
    registry, slash, rest = image.partition("/")
    is_registry = bool(slash) and re.search(r"[.:]|^localhost$", registry) is not None
    return f"{registry}#{rest}" if is_registry else image


def _apptainer(job: JobSpec, options: SlurmOptions) -> Runtime:
    setup = '_ddp_engine=$(command -v apptainer || command -v singularity) || end 69 unavailable "no apptainer here"\n'
    setup += f"_ddp_image={_sif(job, options)}\n"
    source = shlex.quote("docker://" + job.image)
    if not options.sif:
        setup += f"""\
# Pull the image once, into a folder that all nodes share. The lock keeps two jobs from pulling it at the same time.
if [[ ! -s $_ddp_image ]]; then
  {{ mkdir -p "${{_ddp_image%/*}}" && exec 8>"$_ddp_image.lock"; }} ||
    end {Exit.CANNOT_WRITE:d} unavailable "cannot write $_ddp_image.lock"
  # flock exits with 1 after the timeout. Other errors mean that the filesystem has no locks: continue without one.
  flock --wait {PULL_S} 8 || (($? != 1)) ||
    end {Exit.UNAVAILABLE:d} unavailable "another job has held $_ddp_image.lock for {PULL_S} s"
  if [[ ! -s $_ddp_image ]]; then
    if ! "$_ddp_engine" pull "$_ddp_image.$SLURM_JOB_ID" {source}; then
      rm -f "$_ddp_image.$SLURM_JOB_ID"
      end {Exit.UNAVAILABLE:d} unavailable "${{_ddp_engine##*/}} cannot pull the image: see the lines above"
    fi
    mv -f "$_ddp_image.$SLURM_JOB_ID" "$_ddp_image"
  fi
  exec 8>&-
fi
"""
    binds = tuple(f"--bind {mount}" for mount in mounts(job))
    flags = ("--cleanenv", "--no-home", *([] if job.device == "cpu" else ["--nv"]), f"--pwd {WORKSPACE}")
    words = lines(
        ('"$_ddp_engine" exec', *flags, *binds, *map(shlex.quote, options.runtime_args), '"$_ddp_image" ddprun')
    )
    listed = " \\\n  ".join(lines(handed_in(job)))
    return Runtime(
        setup=f"{setup}export _ddp_image\n",
        needs="""\
[ -e "$_ddp_image" ] || lacks 66 "there is no $_ddp_image: it must be on a filesystem that all nodes share"
""",
        on_node=f"""\
{PLAIN}for _ddp_name in {listed} "${{!NCCL_@}}" "${{!UCX_@}}"; do # override the image's variables
  [ -z "${{!_ddp_name+x}}" ] ||
    export "APPTAINERENV_$_ddp_name=${{!_ddp_name}}" "SINGULARITYENV_$_ddp_name=${{!_ddp_name}}"
done
exec "$@"
""",
        words=BREAK.join(words),
    )


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
            find = """'s/^ "pid": \\([0-9]*\\),.*/\\1/p'"""
            text = f'exec enroot exec "$(sed -n {find} "$0")" "$@"'
            return ("bash", "-c", text, f"{run_dir}/{run_files.node_name(node)}/{run_files.NODE}", *argv)
        case "apptainer":  # another container, with the same image and folders
            binds = (f"--bind {shlex.quote(mount)}" for mount in job.mounts)
            flags = [
                "--cleanenv",
                "--no-home",
                f"--pwd {WORKSPACE}",
                *([] if job.device == "cpu" else ["--nv"]),
                *binds,
            ]
            text = f'''\
_ddp_engine=$(command -v apptainer || command -v singularity) _ddp_image={_sif(job, options)}
exec "$_ddp_engine" exec {" ".join([*flags, *map(shlex.quote, options.runtime_args)])} \\
  --bind "$0:{WORKSPACE}" --bind "$1:$1" "$_ddp_image" "${{@:2}}"'''
            return ("bash", "-c", text, workdir, run_dir, *argv)
    return argv


_LIMITS = {
    "docker": """\
_ddp_more=() # a container of docker is outside the job's cgroup, so it needs the job's limits
[ "${_ddp_memory:-0}" = 0 ] || _ddp_more+=(--memory "${_ddp_memory}m")
_ddp_cores=${SLURM_CPUS_PER_TASK:-0}
[ "$_ddp_cores" = 0 ] || [ "$_ddp_cores" -gt "$(getconf _NPROCESSORS_ONLN)" ] || _ddp_more+=(--cpus "$_ddp_cores")
""",
    "podman": """\
_ddp_more=() # with crun, the container can stay in the job's cgroup, and so has its limits
[ "$(podman info --format '{{.Host.OCIRuntime.Name}}' 2>/dev/null)" != crun ] || _ddp_more+=(--cgroups=disabled)
""",
}


def engine_of(job: JobSpec, options: SlurmOptions) -> Runtime:
    """Return the parts of the batch script that depend on podman or docker.

    A container is not a child process of its srun task, and does not end with the task. So ddprun reads a pipe from
    the task. When the task ends, the pipe is closed, and ddprun saves and stops.
    """
    engine = options.runtime
    who = "--userns=keep-id" if engine == "podman" else '--user "$(id -u):$(id -g)"'
    each = '_ddp_gpus+=(--device "nvidia.com/gpu=$_ddp_id")' if engine == "podman" else '_ddp_ids+="$_ddp_id,"'
    first = "" if engine == "podman" else "  _ddp_ids=\n"
    hand = "" if engine == "podman" else '  [ -z "$_ddp_ids" ] || _ddp_gpus=(--gpus "\\"device=${_ddp_ids%,}\\"")\n'
    words = (
        "--rm", "--init", "--interactive", "--network=host", '--label "ddpctl.run=$DDP_RUN_ID"',
        f"--shm-size={job.shm_size[:-1].lower()}", "--cap-drop=ALL",
        "--security-opt=no-new-privileges", who, f"--workdir {WORKSPACE}", "--env HOME=/tmp",
        f"--env {names.LIFELINE_FD}=3", *(f"--env {name}" for name in handed_in(job)),
        *(f"--volume {mount}" for mount in mounts(job)), *map(shlex.quote, options.runtime_args),
        "--entrypoint sh", shlex.quote(job.image),
    )  # fmt: skip
    test = {"cuda": "true", "auto": "command -v nvidia-smi >/dev/null", "cpu": "false"}[job.device]
    return Runtime(
        setup=_MEMORY if engine == "docker" else "",
        needs=f'command -v {engine} >/dev/null || lacks 69 "there is no {engine}"\n',
        on_node=f"""\
{PLAIN}_ddp_name=ddpctl-$SLURM_JOB_ID-$SLURM_NODEID _ddp_gpus=()
{_LIMITS[engine]}for _ddp_variable in "${{!NCCL_@}}" "${{!UCX_@}}"; do # the site's network settings
  _ddp_more+=(--env "$_ddp_variable")
done
if {test}; then # pass only this job's GPUs
{first}  for _ddp_id in $(echo "${{SLURM_STEP_GPUS:-${{CUDA_VISIBLE_DEVICES:-}}}}" | tr , ' '); do
    {each}
  done
{hand}  [ ! -d /dev/infiniband ] || _ddp_gpus+=(--device /dev/infiniband --ulimit memlock=-1) # NCCL locks memory
  unset CUDA_VISIBLE_DEVICES
fi
# The container's stdin is a pipe from a sleep process of this task. If Slurm kills the task, it also kills sleep. The
# pipe then closes, and ddprun in the container saves and stops. sleep ignores the other signals that Slurm sends.
exec 9< <(trap '' TERM INT HUP USR1 USR2 && exec sleep infinity)
_ddp_pipe=$!
trap '_ddp_woken=1' TERM INT # Slurm also signals the client, which forwards the signal
{engine} rm --force "$_ddp_name" >/dev/null 2>&1 # left from an earlier start
{engine} run --name "$_ddp_name" "${{_ddp_more[@]}}" "${{_ddp_gpus[@]}}" "$@" <&9 9<&- &
_ddp_client=$!
exec 9<&-
_ddp_woken=1
while ((_ddp_woken)); do # a signal interrupts wait, so wait again
  _ddp_woken=0 _ddp_code=0
  wait "$_ddp_client" || _ddp_code=$?
done
kill -KILL "$_ddp_pipe" 2>/dev/null
{engine} rm --force "$_ddp_name" >/dev/null 2>&1
exit "$_ddp_code"
""",
        interrupt=f'{engine} kill --signal INT "ddpctl-$SLURM_JOB_ID-$SLURM_NODEID" >/dev/null',
        words=BREAK.join((*lines(words), """-c 'exec 3<&0 </dev/null; exec ddprun "$@"' ddprun""")),
    )
