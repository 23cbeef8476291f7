"""The environment of outside tools: without variables that change their answers.

A variable such as SQUEUE_PARTITION is an input that nobody typed: with it, a running job looks like a lost one.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

# Slurm's filters and formats of answers (squeue(1), sacct(1), scancel(1), sinfo(1)), and another git repository than
# that of the folder (git(1)). Variables of sbatch stay: they are a user's account or partition.
REMOVED = (
    *("SQUEUE_*", "SACCT_*", "SCANCEL_*", "SINFO_*", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN"),
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_*_PATHSPECS"),
)
READER = "printenv"  # reads the user's own variables, so it gets all of them


def is_removed(name: str) -> bool:
    """Return whether a tool must not get the variable ``name``."""
    return any(fnmatchcase(name, pattern) for pattern in REMOVED)


def tool_environment(environ: Mapping[str, str], program: str) -> dict[str, str]:
    """Return the environment for a program of this machine."""
    return {name: value for name, value in environ.items() if program == READER or not is_removed(name)}
