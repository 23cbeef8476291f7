"""Renders the parts of the batch script that depend on the container runtime (pyxis, apptainer, podman, docker).

In a container, the project is at /workspace, and the run's folders have the same paths as on the node. The container
uses the node's network. Each variable that a container needs is passed by its name. So its value overrides the image's
value, and does not appear on a command line.
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from ddpctl.job.spec import JobSpec
from ddpctl.targets.slurm.options import SlurmOptions
from ddpwire import names, run_files
from ddpwire.exits import Exit

WORKSPACE = "/workspace"
OWN_MOUNTS = (
    f"$PWD:{WORKSPACE}",
    *(f"${place}:${place}" for place in (names.RUN_DIR, names.CHECKPOINT_DIR, names.TARGETS_DIR)),
)
BREAK = " \\\n  "
WIDTH = 115


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The parts of a batch script that differ between runtimes."""

    setup: str = ""  # commands for the first node
    needs: str = ""  # a command that fails on a node that cannot start a container
    node: str = ""  # a script for each node, which starts ddprun with its arguments
    command: str = 'bash -c "$_ddp_node" node'  # the rest of the srun line: options of srun, and the program


def variables(job: JobSpec, *more: str) -> str:
    """Return a shell command that prints the names of the variables to pass to a container."""
    others = "|".join((*more, *job.secrets))
    return f"compgen -e | grep -xE '(DDP|PET|SLURM|NCCL|UCX)_.*{f'|{others}' if others else ''}'"


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
    render = {"pyxis": _pyxis, "apptainer": _apptainer}.get(options.runtime, _engine)
    return render(job, options)


def _pyxis(job: JobSpec, options: SlurmOptions) -> Runtime:
    shared = f'"{",".join(OWN_MOUNTS)}"'
    shared += shlex.quote("," + ",".join(job.mounts)) if job.mounts else ""
    # enroot's format of ghcr.io/a/b:1 is ghcr.io#a/b:1.
    image = re.sub(r"^(localhost|[^/]*[.:][^/]*)/", r"\1#", job.image)
    options_of_srun = (
        f"--container-image={shlex.quote(image)} --container-workdir={WORKSPACE}",
        f"--container-mounts={shared}",
        f'--container-env="$({variables(job, "CUDA_VISIBLE_DEVICES")} | paste -s -d ,)"',
        *lines(("--no-container-mount-home", "--no-container-entrypoint", *map(shlex.quote, options.runtime_args))),
    )
    return Runtime(command=BREAK.join((*options_of_srun, "ddprun")))


def _apptainer(job: JobSpec, options: SlurmOptions) -> Runtime:
    setup = "_ddp_engine=$(command -v apptainer || command -v singularity) || "
    setup += f'{{ echo "slurm: no apptainer here" >&2; exit {Exit.UNAVAILABLE:d}; }}\n'
    setup += f"export _ddp_engine _ddp_image={_sif(job, options)}\n"
    source = shlex.quote(f"docker://{job.image}")
    if not options.sif:
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
            step = f"$0/{run_files.STEP}"  # scontrol takes "JOB." for the step 0
            find = f'[[ -s {step} ]] && scontrol listpids "$SLURM_JOB_ID.$(<{step})" | awk \'$4 == "0" {{print $1}}\''
            return ("bash", "-c", f'exec enroot exec "$({find})" "$@"', run_dir, *argv)
        case "apptainer":  # another container, with the same image and folders
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
    words = (
        f"exec {engine} run --name={name}", "--rm", "--init", "--interactive", "--network=host",
        '--label="ddpctl.run=$DDP_RUN_ID"', f"--shm-size={job.shm_size[:-1].lower()}", "--cap-drop=ALL",
        "--security-opt=no-new-privileges", f"--workdir={WORKSPACE}", *_SHARE[engine],
        *([] if job.device == "cpu" else [gpus, infiniband]), f"--env-file=<({variables(job)})",
        f"--env=HOME=/tmp --env={names.LIFELINE_FD}=3", *(f"--volume={mount}" for mount in mounts(job)),
        *map(shlex.quote, options.runtime_args), "--entrypoint=sh", shlex.quote(job.image),
    )  # fmt: skip
    program = '-c \'exec 3<&0 </dev/null; exec ddprun "$@"\' ddprun "$@"'
    return Runtime(
        setup=_MEMORY if engine == "docker" else "",
        needs=f"{engine} version",
        node=f"""\
{engine} rm --force {name} >/dev/null 2>&1 # left from an earlier start
# Variables are passed by name. If Slurm kills this task, the pipe to the container closes, and ddprun saves and ends.
{BREAK.join((*lines(words), program))} < <(trap '' TERM && exec tail --follow --pid=$$ /dev/null)
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
