"""The options of a target of kind slurm.

Their values are used in scripts and command lines. Quoting cannot protect a ``#SBATCH`` line from a line break in a
value, so each value must match a pattern of allowed characters.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from ddpctl.command import Host
from ddpctl.files import environments
from ddpctl.job.spec import RUNTIME_ARGS, JobSpec
from ddpctl.job.values import Options, Rule, Words, between, matching

Runtime = Literal["none", "pyxis", "apptainer", "podman", "docker"]

WORD = matching(  # a name in the cluster, or several with commas
    r"(?=.{1,256}$)[A-Za-z0-9][A-Za-z0-9_.@+,:-]*", "letters, digits and _ . @ + - : , are allowed"
)
FEATURES = matching(
    r"(?=.{1,256}$)[A-Za-z0-9\[(][A-Za-z0-9_.@+,:|&*()\[\]-]*",
    "features and & | * ( ) [ ] are allowed, without blanks: a100&nvlink",
)
PATH = matching(r"/[^\x00-\x1f\x7f-\x9f\u2028\u2029,:]*", "expected an absolute path without comma, colon or newline")
MODULES = matching(r"(?!-)[A-Za-z0-9_.+/-]+", "a module is NAME or NAME/VERSION, such as cuda/12.4")
ARRAY_PATTERN = re.compile(r"[0-9]+(-[0-9]+(:[1-9][0-9]*)?)?(,[0-9]+(-[0-9]+(:[1-9][0-9]*)?)?)*(%[1-9][0-9]*)?")
ALL_MEMORY = "--mem=0"  # all memory of each node
GPU_GRES = re.compile(r"[=,](gres/)?gpu\b")
EXTRA_PATTERN = re.compile(r"--([a-z][a-z0-9-]*)(=[\w./@+,:|&*()\[\]%=-]+)?", re.ASCII)
# Options that ddpctl itself sets, each with the key that changes it, and options that would replace the script.
TAKEN = {
    "array": "array", "nodes": "nodes", "cpus-per-task": "cpus", "gpus": "gpus", "gpus-per-node": "gpus",
    "mem": "memory", "time": "time_limit", "job-name": "name", "partition": "partition", "account": "account",
    "qos": "qos", "reservation": "reservation", "constraint": "constraint", "exclusive": "exclusive",
    "requeue": "requeues", "no-requeue": "requeues", "chdir": "workdir", "output": "runs", "error": "runs",
    "export": "env", "export-file": "env", "ntasks": "", "ntasks-per-node": "", "gpus-per-task": "", "signal": "",
    "open-mode": "", "wrap": "", "parsable": "", "test-only": "", "wait": "", "overlap": "",
}  # fmt: skip
# srun would read these options from variables of sbatch. The script unsets them, because they may be another job's.
OF_SRUN = (
    "hint", "gpu-bind", "mem-bind", "distribution", "threads-per-core", "overcommit", "cpus-per-gpu", "tres-per-task",
)  # fmt: skip
LEAD_S = 60  # time for the script to requeue the job
EARLY_S = 60  # how much earlier than requested Slurm may send a signal (--signal in sbatch(1))
MAX_TEXT = 256
MAX_TASK = 4_000_000  # one less than the largest MaxArraySize that Slurm accepts


def check_array(text: str) -> str:
    """Check that a string is a job array such as ``0-3%2``. Raises ValueError."""
    if not ARRAY_PATTERN.fullmatch(text) or len(text) > MAX_TEXT:
        raise ValueError("expected numbers and ranges as in sbatch, such as 0-3 or 1,5,7 or 0-15%4 (four at a time)")
    for first, last in re.findall(r"([0-9]+)-([0-9]+)", text):
        if int(first) > int(last):
            raise ValueError(f"the range {first}-{last} is empty: its first number must be the smaller one")
    if any(int(number) > MAX_TASK for number in re.findall(r"[0-9]+", text)):
        limit = "a cluster may have a lower limit: see MaxArraySize in scontrol show config"
        raise ValueError(f"Slurm allows numbers up to {MAX_TASK:,} ({limit})")
    return text


def check_extra(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Check that each line is one option of sbatch that ddpctl does not set itself. Raises ValueError."""
    for line in lines:
        match = EXTRA_PATTERN.fullmatch(line)
        if not match or len(line) > MAX_TEXT:
            raise ValueError("an option of sbatch is --NAME or --NAME=VALUE, without blanks, quotes or #")
        if match[1] in TAKEN and line != ALL_MEMORY:
            key = TAKEN[match[1]]
            to_do = f": use the key {key}" if key else ", and no key changes it"
            raise ValueError(f"--{match[1]} is set by ddpctl{to_do}")
        if match[1] == "gres" and GPU_GRES.search(line):
            raise ValueError("--gres=gpu is set by ddpctl: use the keys gpus, gpu_type and gpu_request")
    return lines


def check_login(login: str) -> str:
    """Check that a text names a host for ssh. Raises ValueError."""
    Host.from_text(login)
    return login


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(Options):
    """The options of a target of kind slurm. Without a value for an option of sbatch, the cluster's default applies."""

    login: Annotated[str, Rule(check_login)] | None = None
    """The login node, as [USER@]HOST[:PORT]. null: this machine is a login node."""
    workdir: Annotated[str, PATH] | None = None
    """The project's folder on the cluster. null: the current folder, or with login your home folder there."""
    runs: Annotated[str, PATH] | None = None
    """The folder of the runs, on a file system that all nodes share. null: the default folder of this machine, or with
    login ~/.local/state/ddpctl/runs on the cluster."""
    runtime: Runtime = "none"
    """The container runtime of the nodes. none: no container, but a Python with ddpctl[train]."""
    python: Annotated[str, PATH] | None = None
    """For runtime none: a Python that all nodes can read, such as that of a venv. null: $PYTHON, else python3 on
    PATH."""
    # The paths here are absolute, because the record of a run keeps them, and may be read from another folder.
    environment: Annotated[str, Rule(os.path.abspath)] | None = None
    """For runtime none: a uv.lock, pylock.toml or requirements.txt here, from which the login node makes a Python
    environment beside the runs."""
    wheelhouse: Annotated[str, Rule(os.path.abspath)] | None = None
    """A folder here with all wheels of the environment, for a login node without a network."""
    modules: Annotated[Words, MODULES] = ()
    """Environment modules to load before the start."""
    sif: Annotated[str, PATH] | None = None
    """For runtime apptainer: a .sif file to use instead of the job's image."""
    runtime_args: Annotated[Words, RUNTIME_ARGS] = ()
    """More options for the container runtime, each as --NAME=VALUE."""
    partition: Annotated[str, WORD] | None = None
    """The partition, or several separated by commas: Slurm takes the one that can start first."""
    account: Annotated[str, WORD] | None = None
    """The account to charge."""
    qos: Annotated[str, WORD] | None = None
    """The quality of service."""
    reservation: Annotated[str, WORD] | None = None
    """The reservation to use."""
    constraint: Annotated[str, FEATURES] | None = None
    """Features that the nodes must have."""
    exclusive: bool = False
    """Whether the job gets whole nodes for itself."""
    gpu_type: Annotated[str, WORD] | None = None
    """The type of GPU, as the cluster names it."""
    gpu_request: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """How GPUs are requested; gres for clusters that support nothing else."""
    array: Annotated[str, Rule(check_array)] | None = None
    """Run the job as an array, such as 0-3%2."""
    after: Annotated[str, WORD] | None = None
    """A run that must succeed before this one starts."""
    requeues: Annotated[int, between(0, 1000)] = 20
    """Largest number of requeues after a time limit, a preemption or a lost node; 0: none. Three starts in a row
    without a new checkpoint always end the run."""
    prometheus: Annotated[str, PATH] | None = None
    """A folder that Prometheus reads with file_sd: each job writes its metrics addresses there while it runs."""
    extra: Annotated[Words, Rule(check_extra)] = ()
    """More options for sbatch, each as --NAME=VALUE."""

    def problems(self, job: JobSpec) -> Iterable[tuple[str, str]]:
        """Yield the key of each setting that is impossible on Slurm, with an error message."""
        yield from environments.problems(self, python=None)
        if job.time_limit_s is not None and job.time_limit_s <= 2 * lead_s(job):
            # Twice: then also a warning that Slurm sends EARLY_S too early comes after the start.
            least = 2 * lead_s(job) // 60 + 1
            warned = f"{lead_s(job)} to {lead_s(job) + EARLY_S} s before the limit"
            reason = f"with a grace of {job.grace:g} s, Slurm warns the ranks {warned}"
            text = f"a time limit of {job.time_limit} is too short: {reason}"
            yield "job.time_limit", f"{text}; set a limit of at least {least}m, or a shorter grace"
        if self.sif and self.runtime != "apptainer":
            yield "target.sif", f"a .sif file needs the runtime 'apptainer', but the runtime is '{self.runtime}'"
        if ALL_MEMORY in self.extra and job.memory:
            yield "target.extra", f"{ALL_MEMORY} asks for all memory, but the job's memory is {job.memory}"
        for name in job.env:
            if name.startswith(("SLURM_", "SRUN_", "SBATCH_")):
                yield "job.env", f"{name} is reserved for Slurm"
        if self.runtime != "none" and job.spares:
            yield "job.spares", "on Slurm, spares need the runtime 'none'"
        if self.runtime != "none":
            for mount in job.mounts:
                if not mount.startswith("/"):
                    yield "job.mounts", f"'{mount}' must begin with an absolute path of the nodes"


def lead_s(job: JobSpec) -> int:
    """Return how many seconds before a job's time limit Slurm must send the warning.

    The job needs this time to save and to be requeued.
    """
    return int(job.stop_s) + LEAD_S
