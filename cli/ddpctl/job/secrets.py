"""Reads secrets from the environment, warns about exposed secrets, and redacts secrets in text.

A secret is passed to nodes only in the stdin of a command that is marked ``secret``, or in a file with mode 0600.
"""

import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from urllib.parse import quote

from ddpctl.errors import ConfigError
from ddpctl.job.spec import JobSpec
from ddpwire.run_files import STORE_SECRET

# Names that look like names of secrets, but are not: tokenizers, numbers of tokens, authors, files and variables.
_INNOCENT = re.compile(
    r"tokeni[sz]|tokens|author(?!i)|(?:^|[_.-])(?:file|path|dir|name|env|type|id|len|length|dim|size)$", re.IGNORECASE
)
_NO_SECRET = re.compile(r"[0-9.,]{0,6}|true|false|none|null|on|off|yes|no", re.IGNORECASE)
REDACTED = "[REDACTED]"
SHORTEST = 6  # characters; shorter values are not searched for, because they occur in other words
_WORDS = (
    r"pass(?:phrase|wd|word|code)|secret|token|credential|auth|cookie|signature"
    r"|(?:api|access|account|private|signing|encryption|ssh)[_-]?key"
)
_SOUNDS = re.compile(_WORDS, re.IGNORECASE)
_FLAG = r"--[a-z][a-z0-9_-]*(?:=[\w.,:/-]*)?|-[a-zA-Z]"


def exposed(job: JobSpec) -> str | None:
    """Return a warning if a variable of ``job.env`` looks like a secret, otherwise None."""
    names = [name for name, value in job.env.items() if looks_secret(name, value)]
    return _warning(f"env: {', '.join(names)}", "specs and records", names)


def exposed_arguments(job: JobSpec) -> str | None:
    """Return a warning if an option of a command looks like a secret, otherwise None."""
    names = list(dict.fromkeys(name for name, value in _options(job) if looks_secret(name, value)))
    variables = [re.sub("[-.]", "_", name.strip("-")).upper() for name in names]
    return _warning(", ".join(names), "specs, records and process lists", variables)


def _warning(exposed: str, places: str, variables: Sequence[str]) -> str | None:
    if not variables:
        return None
    advice = f"to pass {'it' if len(variables) == 1 else 'them'} from your environment, set secrets: "
    return f"{exposed} would be visible in {places}: {advice}[{', '.join(variables)}]"


def options_of(command: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each ``--name value``, ``--name=value`` and ``name=value``."""
    for word, following in zip(command, (*command, "")[1:], strict=True):
        name, equals, value = word.partition("=")
        if equals and re.fullmatch(r"[\w.-]+", name):
            yield name, value
        elif word.startswith("-") and not following.startswith("-"):
            yield word, following


def looks_secret(name: str, value: str) -> bool:
    """Return whether a variable or an option with this name and value looks like a secret."""
    looks = sounds_secret(name) or name.upper().endswith("_KEY")
    return looks and not _INNOCENT.search(name) and not _NO_SECRET.fullmatch(value)


def exposed_values(job: JobSpec) -> list[str]:
    """Return the values in ``job.env`` and in the options of commands whose names look like names of secrets."""
    return [value for name, value in (*job.env.items(), *_options(job)) if looks_secret(name, value)]


def _options(job: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the options of the script, and of the commands that run on each node."""
    yield from options_of(job.command)
    for text in (*job.node_setup, *job.node_teardown, *job.notify):
        try:
            argv = shlex.split(text)
        except ValueError:  # an open quote
            argv = text.split()
        yield from options_of(tuple(word.rstrip(";|&)") for word in argv))


def read_secrets(job: JobSpec, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the values of the job's secrets, keyed by name. Raises ConfigError if a secret is not set."""
    if missing := [name for name in job.secrets if name not in environ]:
        raise ConfigError(f"secrets: your environment does not contain {', '.join(missing)}: export {missing[0]}=...")
    return {name: environ[name] for name in job.secrets}


def make_store_secret(folder: str, *others: str) -> str:
    """Return a script that makes folders (quoted for a shell), and a secret in the first one, if it has none yet."""
    file = f"{folder}/{STORE_SECRET}"
    return f"""\
mkdir -p {" ".join((folder, *others))} && {{ [ -s {file} ] ||
  (umask 077 && od -An -v -tx1 -N32 /dev/urandom | tr -d ' \\n' >{file}); }}"""


# Redaction. The values of a job's secrets are removed everywhere, and so is a value whose variable, flag or key has a
# name like that of a secret. Text that a program prints is not searched for anything else: a pattern that promises more
# misses some, and removes what is no secret.

_ADDRESS = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]{0,20}://)(?P<rest>\S++)", re.IGNORECASE)


def sounds_secret(name: str) -> bool:
    """Return whether the name of a variable, a flag or a key looks like the name of a secret."""
    return _SOUNDS.search(name) is not None


def can_be_sought(value: str) -> bool:
    """Return whether a value is long enough to be searched for in text."""
    return len(value.strip()) >= SHORTEST


def redact_text(text: str, values: Collection[str] = ()) -> str:
    """Redact ``values``, also in quoted or encoded form, and passwords in addresses."""
    forms = {form for value in values for form in _forms(value) if can_be_sought(form)}
    for form in sorted(forms, key=lambda form: (-len(form), form)):
        text = text.replace(form, REDACTED)
    return _ADDRESS.sub(_without_password, text)


def redact_command(command: Sequence[str], values: Collection[str] = ()) -> tuple[str, ...]:
    """Redact secrets in arguments, and each argument that follows a flag whose name looks like a secret."""
    arguments: list[str] = []
    for before, word in zip(("", *command), command, strict=False):
        name, equals, value = word.partition("=")
        # The next flag cannot be a value, but a value may begin with a dash.
        if before.startswith("-") and "=" not in before and sounds_secret(before) and not re.fullmatch(_FLAG, word):
            arguments.append(REDACTED)
        elif equals and value and re.fullmatch(r"[\w.-]+", name) and sounds_secret(name):
            arguments.append(f"{name}={REDACTED}")
        else:
            arguments.append(redact_text(word, values))
    return tuple(arguments)


def redact_mapping(given: Mapping[str, object], values: Collection[str] = ()) -> dict[str, str]:
    """Redact secrets in the values of a mapping, at any depth, and convert the values to text."""
    return {key: redact_text(str(_redacted(key, value)), values) for key, value in given.items()}


def _redacted(name: str, value: object) -> object:
    match value:
        case {"name": str(variable), "value": content, **others}:  # a variable of a container
            return {"name": variable, "value": _redacted(variable, content), **others}
        case dict() if not sounds_secret(name):
            return {key: _redacted(str(key), inner) for key, inner in value.items()}
        case list() | tuple() if not sounds_secret(name):
            return [_redacted(name, inner) for inner in value]
    return REDACTED if value and sounds_secret(name) else value


def _forms(value: str) -> Iterable[str]:
    """Yield the forms in which a value can occur in text.

    These are the value, its lines, and the value quoted for Python, JSON, shells and URLs.
    """
    for text in (value, value.strip()):
        yield from (text, repr(text)[1:-1], json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
        yield from (shlex.quote(text), quote(text, safe=""), quote(text))
    for line in value.splitlines():
        yield from (line.strip(), repr(line.strip())[1:-1])


def _without_password(match: re.Match[str]) -> str:
    """Return ``scheme://user:[REDACTED]@host``. A password ends at the last @, and may contain a slash or an @."""
    userinfo, _, host = match["rest"].rpartition("@")
    user, colon, _ = userinfo.partition(":")
    return f"{match['scheme']}{user}:{REDACTED}@{host}" if colon and not re.search("[/?#]", user) else match[0]
