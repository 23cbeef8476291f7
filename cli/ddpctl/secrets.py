"""The values of a job's secrets, read where ddpctl runs, and which of its variables look like some. Touches nothing.

A value goes on in a command's stdin that is marked ``secret``, or in a file of mode 0600, and nowhere else.
"""

from collections.abc import Mapping

from ddpctl.command import Command, Verb
from ddpctl.errors import ConfigError
from ddpctl.spec import JobSpec

_ENDINGS = ("_KEY", "_TOKEN", "_SECRET", "PASSWORD")


def exposed(job: JobSpec) -> str | None:
    """A sentence where a variable of env looks like a secret: its value stands in specs and records."""
    names = [name for name, value in job.env.items() if value and name.upper().endswith(_ENDINGS)]
    if not names:
        return None
    return (
        f"env: the value of {', '.join(names)} stands in specs and records as it is: "
        f"secrets: [{', '.join(names)}] takes it from your environment and keeps it out of them"
    )


def read_secrets(job: JobSpec) -> Verb[Mapping[str, str]]:
    """The secrets' values by name. Raises ConfigError for one that is not set here."""
    if not job.secrets:
        return {}
    outputs = yield tuple(Command(argv=("printenv", name), probe=True) for name in job.secrets)
    missing = [name for name, output in zip(job.secrets, outputs, strict=True) if output.returncode]
    if missing:
        raise ConfigError(f"secrets: {', '.join(missing)} not set in your environment: export {missing[0]}=... first")
    return {name: output.stdout.removesuffix("\n") for name, output in zip(job.secrets, outputs, strict=True)}
