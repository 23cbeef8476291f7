"""What a node runs, for each runtime: pieces of the batch script. Pure text; podman and docker are in ``engines``."""

import re
import shlex

from ddpctl.spec import JobSpec
from ddpctl.targets.slurm.engines import engine_of
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.pieces import BREAK, PLAIN, WORKSPACE, Runtime, handed_in, lines, mounts
from ddpwire import folder
from ddpwire.exits import Exit

PULL_S = 3600


def runtime_of(job: JobSpec, options: SlurmOptions) -> Runtime:
    """The pieces for a job."""
    return {"none": _none, "pyxis": _pyxis, "apptainer": _apptainer, "podman": engine_of, "docker": engine_of}[
        options.runtime
    ](job, options)


def _none(_: JobSpec, options: SlurmOptions) -> Runtime:
    given = shlex.quote(options.python) if options.python else "${PYTHON:-python3}"
    return Runtime(
        setup=f"python={given}\nexport python\n",
        needs="""\
"$python" -c 'import importlib.util as u; raise SystemExit(not (u.find_spec("torch") and u.find_spec("ddprun")))' ||
  lacks 66 "$python has no ddpctl[train]: set PYTHON to one that has it, on every node"
""",
        on_node=f'{PLAIN}exec "$@"\n',
        words='"$python" -P -m ddprun',
    )


def _pyxis(job: JobSpec, options: SlurmOptions) -> Runtime:
    shared = f'"$workdir:{WORKSPACE},$run_dir:$run_dir,$DDP_CHECKPOINT_DIR:$DDP_CHECKPOINT_DIR"'
    shared += shlex.quote("," + ",".join(job.mounts)) if job.mounts else ""
    options_of_srun = (
        f"--container-image={shlex.quote(enroot_image(job.image))} --container-workdir={WORKSPACE}",
        f"--container-mounts={shared}",
        *lines(("--no-container-mount-home", "--no-container-entrypoint", *map(shlex.quote, options.runtime_args))),
        f"--container-env={','.join(handed_in(job))}",
    )
    return Runtime(on_node=f'{PLAIN}exec "$@"\n', srun=BREAK.join(options_of_srun), words="ddprun", reader="sh")


def enroot_image(image: str) -> str:
    """``ghcr.io/a/b:1`` as enroot has it: ``ghcr.io#a/b:1``."""
    registry, slash, rest = image.partition("/")
    is_registry = bool(slash) and re.search(r"[.:]|^localhost$", registry) is not None
    return f"{registry}#{rest}" if is_registry else image


def _apptainer(job: JobSpec, options: SlurmOptions) -> Runtime:
    setup = 'apptainer=$(command -v apptainer || command -v singularity) || end 69 unavailable "no apptainer here"\n'
    setup += f"image={_sif(job, options)}\n"
    source = shlex.quote("docker://" + job.image)
    if not options.sif:
        setup += f"""\
# One copy of the image for all nodes, made once, by one job at a time. Its folder must be one that they share.
if [[ ! -s $image ]]; then
  {{ mkdir -p "${{image%/*}}" && exec 8>"$image.lock"; }} ||
    end {Exit.CANNOT_WRITE:d} unavailable "cannot write $image.lock"
  # A filesystem without locks is no reason to stop: then each job pulls for itself.
  flock --wait {PULL_S} 8 || (($? != 1)) ||
    end {Exit.UNAVAILABLE:d} unavailable "another job has held $image.lock for {PULL_S} s"
  if [[ ! -s $image ]]; then
    if ! "$apptainer" pull "$image.$SLURM_JOB_ID" {source}; then
      rm -f "$image.$SLURM_JOB_ID"
      end {Exit.UNAVAILABLE:d} unavailable "${{apptainer##*/}} cannot pull the image: see the lines before this one"
    fi
    mv -f "$image.$SLURM_JOB_ID" "$image"
  fi
  exec 8>&-
fi
"""
    binds = tuple(f"--bind {mount}" for mount in mounts(job))
    flags = ("--cleanenv", "--no-home", *([] if job.device == "cpu" else ["--nv"]), f"--pwd {WORKSPACE}")
    words = lines(('"$apptainer" exec', *flags, *binds, *map(shlex.quote, options.runtime_args), '"$image" ddprun'))
    listed = " \\\n  ".join(lines(handed_in(job)))
    return Runtime(
        setup=f"{setup}export image\n",
        needs='[ -e "$image" ] || lacks 66 "there is no $image: it must be on a filesystem that all nodes share"\n',
        on_node=f"""\
{PLAIN}for name in {listed} "${{!NCCL_@}}" "${{!UCX_@}}"; do # these win over the image's own
  [ -z "${{!name+x}}" ] || export "APPTAINERENV_$name=${{!name}}" "SINGULARITYENV_$name=${{!name}}"
done
exec "$@"
""",
        words=BREAK.join(words),
    )


def _sif(job: JobSpec, options: SlurmOptions) -> str:
    """The image's file, as a word for bash."""
    if options.sif:
        return shlex.quote(options.sif)
    return f"${{DDPCTL_IMAGES:-$HOME/.cache/ddpctl/images}}/{re.sub('[^A-Za-z0-9.-]', '_', job.image)}.sif"


def beside(
    job: JobSpec, options: SlurmOptions, *, number: str, node: int, workdir: str, run_dir: str,
    argv: tuple[str, ...], tty: bool,
) -> tuple[str, ...]:  # fmt: skip
    """What a further step runs for a command beside a node's ranks; no arguments: a shell."""
    argv = argv or ("bash",)
    match options.runtime:
        case "docker" | "podman":
            return (options.runtime, "exec", "-it" if tty else "-i", f"ddpctl-{number}-{node}", *argv)
        case "pyxis":  # its containers have no name, but processes that the node sees
            find = """'s/^ "pid": \\([0-9]*\\),.*/\\1/p'"""
            text = f'exec enroot exec "$(sed -n {find} "$0")" "$@"'
            return ("bash", "-c", text, f"{run_dir}/{folder.node_name(node)}/{folder.NODE}", *argv)
        case "apptainer":  # the same image and folders, in a container of its own
            binds = (f"--bind {shlex.quote(mount)}" for mount in job.mounts)
            flags = [
                "--cleanenv",
                "--no-home",
                f"--pwd {WORKSPACE}",
                *([] if job.device == "cpu" else ["--nv"]),
                *binds,
            ]
            text = f'''\
apptainer=$(command -v apptainer || command -v singularity) image={_sif(job, options)}
exec "$apptainer" exec {" ".join([*flags, *map(shlex.quote, options.runtime_args)])} \\
  --bind "$0:{WORKSPACE}" --bind "$1:$1" "$image" "${{@:2}}"'''
            return ("bash", "-c", text, workdir, run_dir, *argv)
    return argv
