"""The values of a job's secrets, read where ddpctl runs. A verb that others go through; touches nothing.

A value goes on in a command's stdin that is marked ``secret``, or in a file of mode 0600, and nowhere else.
"""

from collections.abc import Mapping

from ddpctl.command import Command, Verb
from ddpctl.errors import ConfigError
from ddpctl.spec import JobSpec


def read_secrets(job: JobSpec) -> Verb[Mapping[str, str]]:
    """The secrets' values by name. Raises ConfigError for one that is not set here."""
    if not job.secrets:
        return {}
    outputs = yield tuple(Command(argv=("printenv", name), probe=True) for name in job.secrets)
    missing = [name for name, output in zip(job.secrets, outputs, strict=True) if output.returncode]
    if missing:
        raise ConfigError(f"secrets: {', '.join(missing)} not set in your environment: export {missing[0]}=... first")
    return {name: output.stdout.removesuffix("\n") for name, output in zip(job.secrets, outputs, strict=True)}
