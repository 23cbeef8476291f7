"""The options of a target of kind kaggle. Their values go into a notebook or its metadata."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from ddpctl.job.launch_plan import TRAINER, program
from ddpctl.job.secrets import exposed
from ddpctl.job.spec import JobSpec
from ddpctl.job.values import Options, Words, matching
from ddpwire import kaggle

INSIDE, NONE = "inside", "none"
T4 = "NvidiaTeslaT4"
GPUS = {T4: 2}  # how many GPUs a session gets; not known for other accelerators
SLUG = "[A-Za-z0-9][A-Za-z0-9_-]*"
SOURCE = f"{SLUG}/{SLUG}(/[0-9]+)?"
FILE = r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*"
OWNER = matching(SLUG, "a user's name as it stands in the address of their page: kaggle.com/NAME")
ACCELERATOR = matching(
    "[A-Za-z0-9]+", "letters and digits, as kaggle kernels push --accelerator takes it: NvidiaTeslaT4"
)
COMPETITIONS = matching(SLUG, "'{}' is not a competition's name as in the address of its page")
FILES = matching(
    rf"(?!(.*/)?\.\.(/|$)){FILE}",
    "'{}' is not a file below the project's folder whose name has only letters, digits and _ . - /",
)
WHEEL = matching(f"{INSIDE}|{NONE}|{SOURCE}", "inside, none, or OWNER/NAME of a data set that holds ddpctl's wheel")
SOURCES = matching(SOURCE, "'{}' is not OWNER/NAME or OWNER/NAME/VERSION, as in the address of its page")


@dataclass(frozen=True, kw_only=True)
class KaggleOptions(Options):
    """The options of a target of kind kaggle."""

    owner: Annotated[str, OWNER] | None = None
    """The notebook's owner. null: the user as whom the client is logged in."""
    accelerator: Annotated[str, ACCELERATOR] = T4
    """The session's accelerator, as the client names it. NvidiaTeslaT4 means two T4s; a job uses both by default."""
    datasets: Annotated[Words, SOURCES] = ()
    """Data sets to attach to the session, each as OWNER/NAME."""
    competitions: Annotated[Words, COMPETITIONS] = ()
    """Competitions whose data to attach; you must have accepted their rules."""
    notebooks: Annotated[Words, SOURCES] = ()
    """Notebooks whose output to attach, each as OWNER/NAME."""
    files: Annotated[Words, FILES] = ()
    """More text files of the project to include in the notebook."""
    internet: bool = False
    """Whether the session may use the internet, which requires a verified phone number."""
    wheel: Annotated[str, WHEEL] = INSIDE
    """Where the session gets ddpctl from. inside: the notebook contains it; OWNER/NAME: a data set with its wheel;
    none: PyPI, which needs internet."""

    @property
    def job_defaults(self) -> Mapping[str, Any]:
        """The job's fields that have a different default value on this target, with that value."""
        return {"gpus": GPUS[self.accelerator]} if self.accelerator in GPUS else {}

    def problems(self, job: JobSpec) -> Iterable[tuple[str, str]]:
        """Yield the key of each setting that is impossible on Kaggle, with an error message."""
        if job.nodes != "1" and not job.is_uneven:  # a list is refused as on the other targets with equal nodes
            yield "job.nodes", f"a Kaggle session is one node, not {job.nodes}"
        if job.device != "cpu" and job.max_gpus > GPUS.get(self.accelerator, job.max_gpus):
            yield "job.gpus", f"a session with {self.accelerator} has {GPUS[self.accelerator]} GPUs, not {job.max_gpus}"
        if job.checkpoint_dir:
            yield "job.checkpoint_dir", "a Kaggle session keeps its checkpoints as its output, and in no other store"
        if job.secrets:
            yield "job.secrets", "the notebook would contain the secret: use Kaggle's Add-ons > Secrets instead"
        if exposed(job):
            yield "job.env", "a variable in env looks like a secret: use Kaggle's Add-ons > Secrets instead"
        if job.time_limit_s is not None and job.time_limit_s > kaggle.LONGEST_S:
            yield "job.time_limit", f"a Kaggle session may run for at most 12h, not {job.time_limit}"
        if job.time_limit_s is not None and job.time_limit_s <= kaggle.MARGIN_S + job.grace + 60:
            reason = "ranks must save 10 minutes before it"
            yield "job.time_limit", f"a time limit of {job.time_limit} is too short: {reason}"
        keys = ("node_setup", "node_teardown", "notify", "stop_signal")
        others = [key for key in keys if getattr(job, key) != vars(JobSpec())[key]]
        yield from ((f"job.{key}", "not supported on Kaggle: use a cell of the rendered notebook") for key in others)
        argv = program(job.command)
        if argv[0] == "-m" and argv[:2] != TRAINER:
            yield "job.command", f"a module (-m {argv[1]}) cannot be sent: use a script and the target's `files`"
        if argv[0] != "-m" and not re.fullmatch(FILE, argv[0]):
            yield "job.command", f"{argv[0]}: only a script below the project's folder can be sent to Kaggle"
