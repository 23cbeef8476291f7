"""The environment variables that outside tools get: those that say where or who, but none that change answers.

A variable such as SQUEUE_PARTITION is an input that nobody typed: with it, a running job looks like a lost one.
"""

import re
import shlex
from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

# Slurm: filters and formats of answers, and options of sbatch, which would replace those of ddpctl.yaml (sbatch(1),
# squeue(1), scancel(1), ...). git: another repository than that of the folder. The others: options of a command line.
REMOVED = (
    *("SBATCH_*", "SALLOC_*", "SQUEUE_*", "SACCT_*", "SCANCEL_*", "SINFO_*", "SCONTROL_*"),
    *("SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN", "SLURM_JSON", "SLURM_YAML"),
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_*_PATHSPECS"),
    *("RSYNC_*", "PIP_*", "ANSIBLE_*", "KUBECTL_*", "COMPOSE_*", "SSH_ASKPASS", "SSH_ASKPASS_REQUIRE"),
)
KEPT = frozenset(
    """
    RSYNC_PROXY RSYNC_CONNECT_PROG
    PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_NO_INDEX PIP_TRUSTED_HOST PIP_CERT PIP_CLIENT_CERT PIP_PROXY
    PIP_CACHE_DIR PIP_CONFIG_FILE PIP_DEFAULT_TIMEOUT PIP_RETRIES
    ANSIBLE_HOME ANSIBLE_LOCAL_TEMP ANSIBLE_REMOTE_TEMP ANSIBLE_REMOTE_USER ANSIBLE_PRIVATE_KEY_FILE
    """.split()  # noqa: SIM905 -- a word list reads better as text
)
READER = "printenv"  # reads the user's own variables, so it gets all of them

# The key of ddpctl.yaml for a variable of sbatch. All other options of sbatch belong in the target's 'extra'.
_KEYS = MappingProxyType(
    {f"SBATCH_{key.upper()}": key for key in ("account", "constraint", "exclusive", "partition", "qos", "reservation")}
    | {"SBATCH_ARRAY_INX": "array", "SBATCH_TIMELIMIT": "time_limit"}
)


def is_removed(name: str) -> bool:
    """Return whether a tool must not get the variable ``name``."""
    return name not in KEPT and any(fnmatchcase(name, pattern) for pattern in REMOVED)


def tool_environment(environ: Mapping[str, str], program: str) -> dict[str, str]:
    """Return the environment for a program of this machine."""
    return {name: value for name, value in environ.items() if program == READER or not is_removed(name)}


def with_tool_environment(line: str) -> str:
    """Return a line for any shell of another machine. There, sh removes the variables and then runs ``line``."""
    return shlex.join(["/bin/sh", "-c", f"{_UNSET}{line}"])


_PATTERNS = "|".join(pattern.replace("*", "[A-Za-z0-9_]*") for pattern in REMOVED)
_UNSET = f"""\
for _ddp_name in $(env | sed -nE '/^({"|".join(sorted(KEPT))})=/d; s/^({_PATTERNS})=.*/\\1/p'); do
  unset "$_ddp_name"
done
unset _ddp_name
"""


def ignored_options(listing: str, directives: tuple[str, ...]) -> tuple[str, ...]:
    """Return a line for each variable of sbatch that would have changed the job.

    ``listing``: the output of printenv. ``directives``: the options of the job, such as ``--partition=gpu``.
    """
    given = re.findall(r"(?m)^(SBATCH_\w+)=(.*)$", listing)
    return tuple(
        f"{name}={value} is ignored: set {_KEYS.get(name, 'extra')} in ddpctl.yaml"
        for name, value in given
        if f"--{_KEYS.get(name, name.removeprefix('SBATCH_').lower().replace('_', '-'))}={value}" not in directives
    )
