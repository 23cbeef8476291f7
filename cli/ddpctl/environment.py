"""The environment variables that outside tools get: those that say where or who, but none that change answers.

A variable such as SQUEUE_PARTITION is an input that nobody typed: with it, a running job looks like a lost one.
"""

import re
from collections.abc import Mapping

# Slurm: filters and formats of answers, and options of sbatch, which would replace those of ddpctl.yaml (sbatch(1),
# squeue(1), scancel(1), ...). git: another repository than that of the folder. The others: options of a command line.
REMOVED = (
    *("SBATCH_*", "SALLOC_*", "SQUEUE_*", "SACCT_*", "SCANCEL_*", "SINFO_*", "SCONTROL_*", "SRUN_*"),
    *("SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN", "SLURM_STD*MODE", "SLURM_LABELIO", "SLURM_EXPORT_ENV"),
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_*_PATHSPECS"),
    *("RSYNC_*", "ANSIBLE_*", "KUBECTL_*", "COMPOSE_*", "SSH_ASKPASS", "SSH_ASKPASS_REQUIRE", "TAR_OPTIONS"),
)
KEPT = (
    *("RSYNC_PROXY", "RSYNC_CONNECT_PROG", "ANSIBLE_HOME", "ANSIBLE_LOCAL_TEMP", "ANSIBLE_REMOTE_TEMP"),
    *("ANSIBLE_REMOTE_USER", "ANSIBLE_PRIVATE_KEY_FILE", "ANSIBLE_*_PASSWORD_FILE"),
    *("ANSIBLE_SSH_*ARGS", "ANSIBLE_SSH_CONTROL_PATH_DIR"),  # a jump host, another known_hosts, a short path
)
READER = "printenv"  # reads the user's own variables, so it gets all of them

_REMOVED, _KEPT = ("|".join(patterns).replace("*", "[A-Za-z0-9_]*") for patterns in (REMOVED, KEPT))
# The first lines of a script of sh: they remove these variables on another machine.
UNSET = f"""\
for _ddp_name in $(env | sed -nE '/^({_KEPT})=/d; s/^({_REMOVED})=.*/\\1/p'); do unset "$_ddp_name"; done
unset _ddp_name
"""


def is_removed(name: str) -> bool:
    """Return whether a tool must not get the variable ``name``."""
    return bool(re.fullmatch(_REMOVED, name)) and not re.fullmatch(_KEPT, name)


def tool_environment(environ: Mapping[str, str], program: str) -> dict[str, str]:
    """Return the environment for a program of this machine."""
    return {name: value for name, value in environ.items() if program == READER or not is_removed(name)}


def ignored_options(listing: str, directives: tuple[str, ...]) -> str:
    """Return a message about the variables of sbatch in the output of printenv that contradict the job's options."""
    ignored = [
        f"{name}={value}"
        for name, value in re.findall(r"(?m)^(SBATCH_\w+)=(.*)$", listing)
        if f"--{name.removeprefix('SBATCH_').lower().replace('_', '-')}={value}" not in directives
    ]
    return f"ignored: {', '.join(ignored)} (set keys of the target, or 'extra', instead)" if ignored else ""
