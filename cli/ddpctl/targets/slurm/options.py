"""The options of a target of kind slurm. Their values go into scripts and commands, so each has an allow-list.

Quoting does not protect against a line break in a ``#SBATCH`` line, so the values of such lines must match patterns.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from ddpctl.spec import Doc, JobSpec, Rule, matching

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
LOGIN = matching(r"([A-Za-z0-9_.-]+@)?[A-Za-z0-9][A-Za-z0-9_.:-]*", "HOST or USER@HOST, as ssh takes it")
# A word with another beginning would be read as the image.
ARGUMENTS = matching(r"--[a-z][^\0\n]*", "an option of the runtime is --NAME or --NAME=VALUE, on one line")
ARRAY_PATTERN = re.compile(r"[0-9]+(-[0-9]+(:[1-9][0-9]*)?)?(,[0-9]+(-[0-9]+(:[1-9][0-9]*)?)?)*(%[1-9][0-9]*)?")
EXTRA_PATTERN = re.compile(r"--([a-z][a-z0-9-]*)(=[\w./@+,:|&*()\[\]%=-]+)?", re.ASCII)
# Options that the script depends on, and options such as --wrap, which would replace it.
TAKEN = (
    "array", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus", "gpus-per-task", "gpus-per-node", "gres",
    "mem", "time", "job-name", "signal", "requeue", "no-requeue", "open-mode", "output", "error", "chdir", "export",
    "export-file", "wrap", "parsable", "test-only", "wait", "partition", "account", "qos", "reservation", "constraint",
    "exclusive", "overlap",
)  # fmt: skip
LEAD_S = 60  # Slurm may send its warning up to a minute early, and a script needs a moment to requeue
MAX_TEXT = 256
MAX_TASK = 4_000_000  # one less than the largest MaxArraySize that Slurm accepts


def check_array(text: str) -> str:
    """Check a job array such as ``0-3%2``. Raises ValueError."""
    if not ARRAY_PATTERN.fullmatch(text) or len(text) > MAX_TEXT:
        raise ValueError("expected numbers and ranges as in sbatch, such as 0-3 or 1,5,7 or 0-15%4 (four at a time)")
    for first, last in re.findall(r"([0-9]+)-([0-9]+)", text):
        if int(first) > int(last):
            raise ValueError(f"the range {first}-{last} is empty: its first number must be the smaller one")
    if any(int(number) > MAX_TASK for number in re.findall(r"[0-9]+", text)):
        raise ValueError(
            f"Slurm allows numbers up to {MAX_TASK:,} (a cluster may allow fewer: MaxArraySize in scontrol show config)"
        )
    return text


def check_extra(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Check options of sbatch, one per entry. Raises ValueError."""
    for line in lines:
        match = EXTRA_PATTERN.fullmatch(line)
        if not match or len(line) > MAX_TEXT:
            raise ValueError("an option of sbatch is --NAME or --NAME=VALUE, without blanks, quotes or #")
        if match[1] in TAKEN:
            raise ValueError(f"--{match[1]} is set by ddpctl: use the corresponding key of the target or job")
    return lines


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """The options of a target of kind slurm. If an option is null, the cluster decides, or the option is not used."""

    login: Annotated[
        str | None,
        Doc("The login node, HOST or USER@HOST as ssh takes it, where Slurm is asked; null: this machine is one."),
        LOGIN,
    ] = None
    workdir: Annotated[
        str | None,
        Doc("The project's folder on the cluster; null: the present folder, through a login node your home there."),
        PATH,
    ] = None
    runs: Annotated[
        str | None,
        Doc(
            "Where the runs' folders are, on a filesystem that all nodes share; "
            "null: as on every target, through a login node .local/state/ddpctl/runs of your home there."
        ),
        PATH,
    ] = None
    runtime: Annotated[
        Runtime,
        Doc("What a node runs the job's image with; none: no container, but a Python with ddpctl[train] on the node."),
    ] = "none"
    python: Annotated[
        str | None,
        Doc("Runtime none: the Python of a venv that all nodes see; null: $PYTHON, else python3 on the PATH."),
        PATH,
    ] = None
    modules: Annotated[tuple[str, ...], Doc("Modules that are loaded first."), MODULES] = ()
    sif: Annotated[str | None, Doc("Runtime apptainer: this .sif file instead of the job's image."), PATH] = None
    runtime_args: Annotated[
        tuple[str, ...], Doc("Further options of the container runtime, one each: --NAME=VALUE."), ARGUMENTS
    ] = ()
    partition: Annotated[str | None, Doc("The partition; several with commas: the earliest."), WORD] = None
    account: Annotated[str | None, Doc("The account that is charged."), WORD] = None
    qos: Annotated[str | None, Doc("The quality of service."), WORD] = None
    reservation: Annotated[str | None, Doc("A reservation."), WORD] = None
    constraint: Annotated[str | None, Doc("Features that the nodes must have."), FEATURES] = None
    exclusive: Annotated[bool, Doc("Whole nodes for this job alone.")] = False
    gpu_type: Annotated[str | None, Doc("The kind of GPU, as the cluster calls it."), WORD] = None
    gpu_request: Annotated[
        Literal["gpus-per-node", "gres"], Doc("How GPUs are asked for; gres where the cluster knows no other way.")
    ] = "gpus-per-node"
    array: Annotated[str | None, Doc("A job array, such as 0-3%2: the same job several times."), Rule(check_array)] = (
        None
    )
    after: Annotated[str | None, Doc("A run that must have succeeded before this one starts."), WORD] = None
    requeues: Annotated[
        int,
        Doc(
            "How often at most the run continues in a new allocation after a time limit, preemption or loss; 0: never. "
            "Three starts in a row without a new checkpoint end it in any case."
        ),
        Ge(0),
        Le(1000),
    ] = 20
    prometheus: Annotated[
        str | None,
        Doc("A folder of Prometheus' file_sd: each job's metrics addresses are written there while it runs."),
        PATH,
    ] = None
    extra: Annotated[tuple[str, ...], Doc("Further options of sbatch, one each: --NAME=VALUE."), Rule(check_extra)] = ()

    def problems(self, job: JobSpec) -> Iterable[tuple[str, str]]:
        """Yield the key and a sentence for each setting that is impossible on Slurm."""
        if job.time_limit_s is not None and job.time_limit_s <= 2 * lead_s(job):
            least = -(-2 * lead_s(job) // 60) + 1
            yield (
                "job.time_limit",
                f"{job.time_limit} is too short: the ranks are warned {lead_s(job)} s before the time limit, and "
                f"Slurm may warn them a minute earlier; give {least}m or more, or a shorter grace",
            )
        if self.sif and self.runtime != "apptainer":
            yield "target.sif", f"a .sif file needs the runtime apptainer, not {self.runtime}"
        for name in job.env:
            if name.startswith(("SLURM_", "SRUN_", "SBATCH_")):
                yield "job.env", f"{name} is reserved for Slurm"
        if self.runtime != "none":
            for mount in job.mounts:
                if not mount.startswith("/"):
                    yield "job.mounts", f"'{mount}' must begin with an absolute path of the nodes"


def lead_s(job: JobSpec) -> int:
    """Return how many seconds before the time limit Slurm warns a job: the grace period plus time for a requeue."""
    return int(job.grace) + LEAD_S
