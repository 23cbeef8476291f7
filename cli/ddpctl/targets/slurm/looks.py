"""What is looked at before a job is sent: that there is a Slurm, and that the script is where the ranks look for it."""

import re

from ddpctl.command import Command, Host, Output, Verb
from ddpctl.errors import DdpctlError, NoInputError, UnavailableError
from ddpctl.plan import Plan, script_of

# What sbatch says where it finds no slurm.conf, no controller or no munge (22.05).
NO_SLURM = re.compile(
    r"configuration source|process configuration file|contact slurm controller|control machine address"
    r"|Munge \w+ failed|authentication error|Zero Bytes were transmitted|Socket timed out",
    re.IGNORECASE,
)
PREFIX = re.compile(r"^(sbatch: )?((error|fatal|allocation failure): )?(Batch job submission failed: )?")


def unreachable(said: Output, host: Host | None) -> DdpctlError | None:
    """Why sbatch's answer is none of Slurm's; None: it is."""
    lines = said.stderr.strip().splitlines()
    if said.returncode == 255 and host is not None:
        return UnavailableError(f"{host}: {lines[-1] if lines else 'no answer'}")
    if said.returncode == 127:
        why = "there is no sbatch"
    elif said.returncode == 124:
        why = f"sbatch: {lines[-1] if lines else 'no answer'}"
    else:
        found = next((line for line in reversed(lines) if NO_SLURM.search(line)), None)
        if said.returncode == 0 or found is None:
            return None
        why = f"sbatch: {PREFIX.sub('', found)}"
    to_do = (
        "run this on a login node, or set login: in the target"
        if host is None
        else "set login: in the target to a login node of the cluster"
    )
    return UnavailableError(f"no Slurm is reachable from {host or 'this machine'} ({why}): {to_do}")


def find_script(plan: Plan, host: Host | None) -> Verb[None]:
    """Look for the script in the project's folder. Raises NoInputError; UnavailableError for a lost login node."""
    script = script_of(plan.job.command)
    if script is None:
        return
    (found,) = yield (Command(argv=("test", "-f", script), cwd=plan.cwd, host=host, probe=True),)
    if found.returncode == 255 and (error := unreachable(found, host)):
        raise error
    if found.returncode:
        where = f"{plan.cwd} of {host}" if host else plan.cwd
        raise NoInputError(f"{script}: no such script in {where}")
