"""Secrets: read their values where ddpctl runs, warn of values that look like secrets, remove secrets from texts.

A value is passed on in a command's stdin that is marked ``secret``, or in a file of mode 0600, and nowhere else.
"""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from urllib.parse import quote

from ddpctl.command import Command, Verb
from ddpctl.errors import ConfigError, UnavailableError
from ddpctl.spec import JobSpec

# What only sounds so: tokenizers, numbers of tokens, authors, and names of files and of variables.
_INNOCENT = re.compile(
    r"tokeni[sz]|tokens|author(?!i)|(?:^|[_.-])(?:file|path|dir|name|env|type|id|len|length|dim|size)$", re.IGNORECASE
)
_NO_SECRET = re.compile(r"[0-9.,]{0,6}|true|false|none|null|on|off|yes|no", re.IGNORECASE)
REDACTED = "[REDACTED]"
SHORTEST = 6  # characters of a value that is looked for: a shorter one would be found everywhere
LONG_USER = 20  # characters of a user in an address, from which on it is a token
_WORDS = (
    r"pass(?:phrase|wd|word|code)|secret|token|credential|auth|cookie|signature"
    r"|(?:api|access|account|private|signing|encryption|ssh)[_-]?key"
)
_NAME = rf"(?<![\w.-])(?=[\w.-]*?(?:{_WORDS}))[\w.-]++"  # a whole word, looked at once: a long line takes no time
_SOUNDS = re.compile(_WORDS, re.IGNORECASE)
_STRING = r"(?:[bru]{0,2}\"(?:\\.|[^\"\\\n])*+\"|[bru]{0,2}'(?:\\.|[^'\\\n])*+')"
# Of a shell. A \' in single quotes may end them, or be Python's: then the value goes to the line's end.
_WORD = r"(?:\\.|\"(?:\\.|[^\"\\\n])*+\"|'(?:\\[^'\n]|[^'\\\n])*+'|[^\s\"'\\])++(?:[\"'\\].*)?|[\"'\\].*"
_NO_COUNT = r"(?!(?<=tokens)(?:\\*[\"'])?\s*+[=:]\s*+[\d.,_]+[kmgbt]?(?![\w.+/=-]))"  # tokens: 4096
_NO_WORD = r"(?!(?:null|none|true|false)[ \t]*(?:[,;)}\]]|$))"
_FLAG = r"(?-i:--[a-z][a-z0-9_-]*(?:=[\w.,:/-]*)?|-[a-zA-Z])"


def exposed(job: JobSpec) -> str | None:
    """A sentence where a variable of env looks like a secret: its value stands in specs and records."""
    names = [name for name, value in job.env.items() if _looks_secret(name, value)]
    if not names:
        return None
    return (
        f"env: the value of {', '.join(names)} is visible in specs and records: "
        f"secrets: [{', '.join(names)}] passes it from your environment instead"
    )


def exposed_arguments(job: JobSpec) -> str | None:
    """The same where an option of the script does: every user of the machines sees it in their list of processes."""
    names = tuple(dict.fromkeys(name for name, value in _options(job.command) if _looks_secret(name, value)))
    if not names:
        return None
    variables = ", ".join(re.sub("[-.]", "_", name.strip("-")).upper() for name in names)
    return (
        f"the value of {', '.join(names)} is visible in specs, records and process lists: "
        f"secrets: [{variables}] passes it from your environment instead"
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
    looks = sounds_secret(name) or name.upper().endswith("_KEY")
    return looks and not _INNOCENT.search(name) and not _NO_SECRET.fullmatch(value)


def read_secrets(job: JobSpec) -> Verb[Mapping[str, str]]:
    """The secrets' values by name. Raises ConfigError for one that is not set here, UnavailableError."""
    if not job.secrets:
        return {}
    outputs = yield tuple(Command(argv=("printenv", name), probe=True) for name in job.secrets)
    missing = [name for name, output in zip(job.secrets, outputs, strict=True) if output.returncode == 1]
    if missing:
        raise ConfigError(f"secrets: {', '.join(missing)} not set in your environment: export {missing[0]}=... first")
    for name, output in zip(job.secrets, outputs, strict=True):
        if output.returncode:  # printenv has said nothing of it
            raise UnavailableError(f"secrets: {name} cannot be read from your environment: {output.last_line()}")
    return {name: output.stdout.removesuffix("\n") for name, output in zip(job.secrets, outputs, strict=True)}


# Redaction, before texts are mailed: by value where it is known (the variables that a job names as its secrets), else
# by name: a variable, a flag or a key that is called like a secret. What a program prints without a name beside it
# cannot be told from any other word. Where it is unclear how far a value goes, too much is taken out: to the line's
# end. Every pattern takes linear time.


# The part that stays, and the value.
_PATTERNS = tuple(
    re.compile(f"(?P<name>{name})(?P<value>{value})", re.IGNORECASE | re.MULTILINE)
    for name, value in (
        # "token": "a b"; and in a text that is itself in quotes, where only the line's end is sure
        (rf"{_NAME}{_NO_COUNT}\\*[\"']\]?\s*+[=:]\s*+{_NO_WORD}", rf"{_STRING}|[^\s,;}}\]\"'\\\[{{(]++(?!\S)|.+"),
        # HF_TOKEN=a b, on a line of its own: a listing of the environment
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
    """Whether a variable, a flag or a key is called like a secret."""
    return _SOUNDS.search(name) is not None


def can_be_sought(value: str) -> bool:
    """Whether a value is long enough to be told from other words."""
    return len(value.strip()) >= SHORTEST


def redact_text(text: str, values: Iterable[str] = ()) -> str:
    """A text without these values, in any way of writing, and without what stands after a name that sounds secret."""
    forms = {form for value in values for form in _forms(value) if can_be_sought(form)}
    for form in sorted(forms, key=lambda form: (-len(form), form)):
        text = text.replace(form, REDACTED)
    text = _PRIVATE_KEY.sub(REDACTED, text)
    text = _ADDRESS.sub(_without_user, text)
    for pattern in _PATTERNS:
        text = pattern.sub(_without_value, text)
    return text


def redact_command(command: Sequence[str], values: Iterable[str] = ()) -> tuple[str, ...]:
    """Arguments: the one after a flag that sounds secret goes as well."""
    found, known = [], tuple(values)
    for index, word in enumerate(command):
        before = command[index - 1] if index else ""
        name, equals, value = word.partition("=")
        if before.startswith("-") and "=" not in before and sounds_secret(before) and not _is_flag(word):
            found.append(REDACTED)
        elif equals and value and re.fullmatch(r"[\w.-]+", name) and sounds_secret(name):
            found.append(f"{name}={REDACTED}")
        else:
            found.append(redact_text(word, known))
    return tuple(found)


def redact_mapping(given: Mapping[str, object], values: Iterable[str] = ()) -> dict[str, str]:
    """Keys and values as text."""
    known = tuple(values)
    return {
        key: REDACTED if sounds_secret(key) and value not in (None, "", (), [], {}) else redact_text(str(value), known)
        for key, value in given.items()
    }


def _forms(value: str) -> Iterable[str]:
    """A value as programs print it: as it is, line by line, in quotes of Python, JSON and the shell, in an address."""
    for text in (value, value.strip()):
        yield from (text, repr(text)[1:-1], json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
        yield from (shlex.quote(text), quote(text, safe=""), quote(text))
    for line in value.splitlines():
        yield from (line.strip(), repr(line.strip())[1:-1])


def _is_flag(word: str) -> bool:
    """Whether it can be nothing but the next flag; a value may begin with a dash, too."""
    return re.fullmatch(_FLAG, word) is not None


def _without_value(match: re.Match[str]) -> str:
    value = match["value"]
    mark = value[0] if len(value) > 1 and value[0] in "\"'" and value[-1] == value[0] else ""
    return match[0] if value == mark * 2 else f"{match['name']}{mark}{REDACTED}{mark}"


def _without_user(match: re.Match[str]) -> str:
    """``scheme://user:[REDACTED]@host``. A password may hold a slash or an @: it ends at the last one."""
    userinfo, at, host = match["rest"].rpartition("@")
    authority = re.split("[/?#]", match["rest"], maxsplit=1)[0]
    user, colon, _ = userinfo.partition(":")
    if not at or ("@" not in authority and ":" not in authority):
        return match[0]
    if not colon:  # a user alone: over HTTP it is a token
        known = REDACTED if match["scheme"].lower().endswith(("http://", "https://")) else user
        return f"{match['scheme']}{known}@{host}"
    return f"{match['scheme']}{REDACTED if len(user) >= LONG_USER else user}:{REDACTED}@{host}"
