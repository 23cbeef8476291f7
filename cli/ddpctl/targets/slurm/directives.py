"""The ``#SBATCH`` lines of a job. They are inputs: sbatch's own options win over them."""

from ddpctl.spec import JobSpec, size_bytes
from ddpctl.targets.slurm.options import SlurmOptions, lead_s


def directives(job: JobSpec, options: SlurmOptions) -> tuple[str, ...]:
    """The options of sbatch, without ``#SBATCH``."""
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
        lines.append("--no-kill")  # the others go on without a node that is lost
    lines += [
        f"--signal=B:USR1@{lead_s(job)}",
        "--requeue" if options.requeues else "--no-requeue",
        "--open-mode=append",
        *options.extra,
    ]
    return tuple(lines)


def _time(seconds: int) -> str:
    """``1-06:00:00``."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
