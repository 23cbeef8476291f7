"""Reads secrets from the environment, warns about exposed secrets, and redacts secrets in text.

A secret is passed to nodes only in the stdin of a command that is marked ``secret``, or in a file with mode 0600.
"""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from urllib.parse import quote

from ddpctl.command import Command, Verb
from ddpctl.errors import ConfigError, UnavailableError
from ddpctl.job.spec import JobSpec
from ddpwire.run_files import STORE_SECRET

# Names that look like names of secrets, but are not: tokenizers, numbers of tokens, authors, files and variables.
_INNOCENT = re.compile(
    r"tokeni[sz]|tokens|author(?!i)|(?:^|[_.-])(?:file|path|dir|name|env|type|id|len|length|dim|size)$", re.IGNORECASE
)
_NO_SECRET = re.compile(r"[0-9.,]{0,6}|true|false|none|null|on|off|yes|no", re.IGNORECASE)
REDACTED = "[REDACTED]"
SHORTEST = 6  # characters; shorter values are not searched for, because they occur in other words
LONG_USER = 20  # characters; a longer user name in an address is redacted as a token
_WORDS = (
    r"pass(?:phrase|wd|word|code)|secret|token|credential|auth|cookie|signature"
    r"|(?:api|access|account|private|signing|encryption|ssh)[_-]?key"
)
_NAME = rf"(?<![\w.-])(?=[\w.-]*?(?:{_WORDS}))[\w.-]++"  # a complete word, scanned only once, because lines may be long
_SOUNDS = re.compile(_WORDS, re.IGNORECASE)
_STRING = r"(?:[bru]{0,2}\"(?:\\.|[^\"\\\n])*+\"|[bru]{0,2}'(?:\\.|[^'\\\n])*+')"
# A word of a shell. In single quotes, \' ends the text in a shell, but is part of the text in Python. Then the end is
# unclear, and the value extends to the end of the line.
_WORD = r"(?:\\.|\"(?:\\.|[^\"\\\n])*+\"|'(?:\\[^'\n]|[^'\\\n])*+'|[^\s\"'\\])++(?:[\"'\\].*)?|[\"'\\].*"
_NO_COUNT = r"(?!(?<=tokens)(?:\\*[\"'])?\s*+[=:]\s*+[\d.,_]+[kmgbt]?(?![\w.+/=-]))"  # tokens: 4096
_NO_WORD = r"(?!(?:null|none|true|false)[ \t]*(?:[,;)}\]]|$))"
_FLAG = r"(?-i:--[a-z][a-z0-9_-]*(?:=[\w.,:/-]*)?|-[a-zA-Z])"


def exposed(job: JobSpec) -> str | None:
    """Return a warning if a variable of ``job.env`` looks like a secret, otherwise None."""
    names = [name for name, value in job.env.items() if _looks_secret(name, value)]
    if not names:
        return None
    return (
        f"env: {', '.join(names)} would be visible in specs and records: "
        f"to pass {'it' if len(names) == 1 else 'them'} from your environment, set secrets: [{', '.join(names)}]"
    )


def exposed_arguments(job: JobSpec) -> str | None:
    """Return a warning if an option of the script looks like a secret, otherwise None."""
    names = tuple(dict.fromkeys(name for name, value in _options(job.command) if _looks_secret(name, value)))
    if not names:
        return None
    variables = ", ".join(re.sub("[-.]", "_", name.strip("-")).upper() for name in names)
    return (
        f"{', '.join(names)} would be visible in specs, records and process lists: "
        f"to pass {'it' if len(names) == 1 else 'them'} from your environment, set secrets: [{variables}]"
    )


def _options(command: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each ``--name value``, ``--name=value`` and ``name=value``."""
    for word, following in zip(command, (*command, "")[1:], strict=True):
        name, equals, value = word.partition("=")
        if equals and re.fullmatch(r"[\w.-]+", name):
            yield name, value
        elif word.startswith("-") and not following.startswith("-"):
            yield word, following


def _looks_secret(name: str, value: str) -> bool:
    looks = sounds_secret(name) or name.upper().endswith("_KEY")
    return looks and not _INNOCENT.search(name) and not _NO_SECRET.fullmatch(value)


def read_secrets(job: JobSpec) -> Verb[Mapping[str, str]]:
    """Return the values of the job's secrets, keyed by name.

    Raises ConfigError if a secret is not set, and UnavailableError if a secret cannot be read.
    """
    if not job.secrets:
        return {}
    outputs = yield tuple(Command(argv=("printenv", name), probe=True) for name in job.secrets)
    missing = [name for name, output in zip(job.secrets, outputs, strict=True) if output.returncode == 1]
    if missing:
        raise ConfigError(f"secrets: your environment does not contain {', '.join(missing)}: export {missing[0]}=...")
    for name, output in zip(job.secrets, outputs, strict=True):
        if output.returncode:  # printenv itself failed
            why = f"because printenv failed: {output.last_line()}"
            raise UnavailableError(f"secrets: cannot read {name} from your environment, {why}")
    return {name: output.stdout.removesuffix("\n") for name, output in zip(job.secrets, outputs, strict=True)}


def make_store_secret(folder: str, *others: str) -> str:
    """Return a script that makes folders (quoted for a shell), and a secret in the first one, if it has none yet."""
    file = f"{folder}/{STORE_SECRET}"
    return f"""\
mkdir -p {" ".join((folder, *others))} && {{ [ -s {file} ] ||
  (umask 077 && od -An -v -tx1 -N32 /dev/urandom | tr -d ' \\n' >{file}); }}"""


# Redaction. The values of a job's secrets are removed everywhere. Other values are removed if the name of their
# variable, flag or key looks like the name of a secret. Private keys, bearer tokens, and passwords and tokens in URLs
# are removed, too. Other secrets are not recognized. If the end of a value is unclear, the rest of the line is removed.
# Every pattern takes linear time.


# The part that is kept, and the value that is removed.
_PATTERNS = tuple(
    re.compile(f"(?P<name>{name})(?P<value>{value})", re.IGNORECASE | re.MULTILINE)
    for name, value in (
        # "token": "a b". Inside a quoted text, the value may extend to the end of the line.
        (rf"{_NAME}{_NO_COUNT}\\*[\"']\]?\s*+[=:]\s*+{_NO_WORD}", rf"{_STRING}|[^\s,;}}\]\"'\\\[{{(]++(?!\S)|.+"),
        # HF_TOKEN=a b on a separate line, as in a listing of the environment
        (r"^(?:\[[^\]\n]{0,40}\] )?(?:export )?" rf"(?-i:(?=[A-Z][A-Z0-9_]*=)){_NAME}=", r".+"),
        # token=a in a command line, --token 'a b'
        (rf"{_NAME}{_NO_COUNT}=(?=\S){_NO_WORD}", _WORD),
        (
            rf"(?<![\w.-])(?=-{{1,2}}[\w.-]*?(?:{_WORDS}))-[\w.-]++(?:[\"'],)?[ \t]++"
            rf"(?!(?:{_FLAG}|(?P<mark>[\"']){_FLAG}(?P=mark)[,\])]?)(?!\S))",
            _WORD,
        ),
        # token: a b; token = a b
        (rf"{_NAME}{_NO_COUNT}(?:[ \t]*+:|[ \t]++=|=(?=\s))\s*+{_NO_WORD}", r".+"),
        (r"\bbearer\s+", r"[^\s\"',;]{6,}"),
    )
)
_ADDRESS = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]{0,20}://)(?P<rest>\S++)", re.IGNORECASE)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----(?:.*?-----END [^-]{0,60}-----|.*)", re.DOTALL)


def sounds_secret(name: str) -> bool:
    """Return whether the name of a variable, a flag or a key looks like the name of a secret."""
    return _SOUNDS.search(name) is not None


def can_be_sought(value: str) -> bool:
    """Return whether a value is long enough to be searched for in text."""
    return len(value.strip()) >= SHORTEST


def redact_text(text: str, values: Iterable[str] = ()) -> str:
    """Redact ``values``, also in quoted or encoded form, and other text that looks like a secret."""
    forms = {form for value in values for form in _forms(value) if can_be_sought(form)}
    for form in sorted(forms, key=lambda form: (-len(form), form)):
        text = text.replace(form, REDACTED)
    text = _PRIVATE_KEY.sub(REDACTED, text)
    text = _ADDRESS.sub(_without_user, text)
    for pattern in _PATTERNS:
        text = pattern.sub(_without_value, text)
    return text


def redact_command(command: Sequence[str], values: Iterable[str] = ()) -> tuple[str, ...]:
    """Redact secrets in arguments, and each argument that follows a flag whose name looks like a secret."""
    found, known = [], tuple(values)
    for index, word in enumerate(command):
        before = command[index - 1] if index else ""
        name, equals, value = word.partition("=")
        # The next flag cannot be a value, but a value may begin with a dash.
        if before.startswith("-") and "=" not in before and sounds_secret(before) and not re.fullmatch(_FLAG, word):
            found.append(REDACTED)
        elif equals and value and re.fullmatch(r"[\w.-]+", name) and sounds_secret(name):
            found.append(f"{name}={REDACTED}")
        else:
            found.append(redact_text(word, known))
    return tuple(found)


def redact_mapping(given: Mapping[str, object], values: Iterable[str] = ()) -> dict[str, str]:
    """Redact secrets in the values of a mapping, and convert the values to text."""
    known = tuple(values)
    return {
        key: REDACTED if sounds_secret(key) and value not in (None, "", (), [], {}) else redact_text(str(value), known)
        for key, value in given.items()
    }


def _forms(value: str) -> Iterable[str]:
    """Yield the forms in which a value can occur in text.

    These are the value, its lines, and the value quoted for Python, JSON, shells and URLs.
    """
    for text in (value, value.strip()):
        yield from (text, repr(text)[1:-1], json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
        yield from (shlex.quote(text), quote(text, safe=""), quote(text))
    for line in value.splitlines():
        yield from (line.strip(), repr(line.strip())[1:-1])


def _without_value(match: re.Match[str]) -> str:
    value = match["value"]
    mark = value[0] if len(value) > 1 and value[0] in "\"'" and value[-1] == value[0] else ""
    return match[0] if value == mark * 2 else f"{match['name']}{mark}{REDACTED}{mark}"


def _without_user(match: re.Match[str]) -> str:
    """Return ``scheme://user:[REDACTED]@host``. A password ends at the last @, and may contain a slash or an @."""
    userinfo, at, host = match["rest"].rpartition("@")
    authority = re.split("[/?#]", match["rest"], maxsplit=1)[0]
    user, colon, _ = userinfo.partition(":")
    if not at or ("@" not in authority and ":" not in authority):
        return match[0]
    if not colon:  # a user without a password: in an HTTP address, this is a token
        known = REDACTED if match["scheme"].lower().endswith(("http://", "https://")) else user
        return f"{match['scheme']}{known}@{host}"
    return f"{match['scheme']}{REDACTED if len(user) >= LONG_USER else user}:{REDACTED}@{host}"
