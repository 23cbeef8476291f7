"""The values of a job's secrets, read where ddpctl runs, and which of its words look like some. Touches nothing.

A value goes on in a command's stdin that is marked ``secret``, or in a file of mode 0600, and nowhere else.
"""

import re
from collections.abc import Iterator, Mapping

from ddpctl.command import Command, Verb
from ddpctl.errors import ConfigError
from ddpctl.redact import sounds_secret
from ddpctl.spec import JobSpec

# What only sounds so: tokenizers, numbers of tokens, authors, and names of files and of variables.
_INNOCENT = re.compile(
    r"tokeni[sz]|tokens|author(?!i)|(?:^|[_.-])(?:file|path|dir|name|env|type|id|len|length|dim|size)$", re.IGNORECASE
)
_NO_SECRET = re.compile(r"[0-9.,]{0,6}|true|false|none|null|on|off|yes|no", re.IGNORECASE)


def exposed(job: JobSpec) -> str | None:
    """A sentence where a variable of env looks like a secret: its value stands in specs and records."""
    names = [name for name, value in job.env.items() if _looks_secret(name, value)]
    if not names:
        return None
    return (
        f"env: the value of {', '.join(names)} stands in specs and records as it is: "
        f"secrets: [{', '.join(names)}] takes it from your environment and keeps it out of them"
    )


def exposed_arguments(job: JobSpec) -> str | None:
    """The same where an option of the script does: every user of the machines sees it in their list of processes."""
    names = tuple(dict.fromkeys(name for name, value in _options(job.command) if _looks_secret(name, value)))
    if not names:
        return None
    variables = ", ".join(re.sub("[-.]", "_", name.strip("-")).upper() for name in names)
    return (
        f"the value of {', '.join(names)} stands in specs, records and every machine's list of processes: "
        f"secrets: [{variables}] takes it from your environment, where the script can read it, and keeps it out of them"
    )


def _options(command: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Names and values: --name value, --name=value, name=value."""
    for word, following in zip(command, (*command, "")[1:], strict=True):
        name, equals, value = word.partition("=")
        if equals and re.fullmatch(r"[\w.-]+", name):
            yield name, value
        elif word.startswith("-") and not following.startswith("-"):
            yield word, following


def _looks_secret(name: str, value: str) -> bool:
    said = sounds_secret(name) or name.upper().endswith("_KEY")
    return said and not _INNOCENT.search(name) and not _NO_SECRET.fullmatch(value)


def read_secrets(job: JobSpec) -> Verb[Mapping[str, str]]:
    """The secrets' values by name. Raises ConfigError for one that is not set here."""
    if not job.secrets:
        return {}
    outputs = yield tuple(Command(argv=("printenv", name), probe=True) for name in job.secrets)
    missing = [name for name, output in zip(job.secrets, outputs, strict=True) if output.returncode]
    if missing:
        raise ConfigError(f"secrets: {', '.join(missing)} not set in your environment: export {missing[0]}=... first")
    return {name: output.stdout.removesuffix("\n") for name, output in zip(job.secrets, outputs, strict=True)}
