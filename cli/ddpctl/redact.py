"""Takes out of texts what is nobody else's to read, before they are mailed around. Pure.

By value where it is known (the variables that a job names as its secrets), else by name: a variable, a flag or a key
that is called like a secret. What a program prints without a name beside it cannot be told from any other word.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

REDACTED = "[REDACTED]"
SHORTEST = 6  # characters of a value that is looked for: a shorter one would be found everywhere
_WORDS = r"pass(?:phrase|wd|word)|secret|token|credential|(?:api|access|private)[_-]?key|auth"
_NAME = rf"(?<![\w.-])(?=[\w.-]*?(?:{_WORDS}))[\w.-]++"  # a whole word, looked at once: a long line takes no time
_IS_NAME = re.compile(rf"-*{_NAME}", re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?P<name>{_NAME}[\"']?\s*[=:]\s*[\"']?)(?P<value>(?:bearer\s+)?[^\s\"',;&]+)", re.IGNORECASE)
_IN_URL = re.compile(r"(?P<name>\b[a-z][a-z0-9+.-]{0,20}://[^\s/:@]*:)(?P<value>[^\s/@]+)(?=@)", re.IGNORECASE)


def sounds_secret(name: str) -> bool:
    """Whether a variable, a flag or a key is called like a secret."""
    return _IS_NAME.fullmatch(name) is not None


def text(said: str, values: Iterable[str] = ()) -> str:
    """A text without these values, and without what stands after a name that sounds secret."""
    for value in sorted((value for value in values if len(value) >= SHORTEST), key=len, reverse=True):
        said = said.replace(value, REDACTED)
    for pattern in (_ASSIGNED, _IN_URL):
        said = pattern.sub(rf"\g<name>{REDACTED}", said)
    return said


def words(command: Sequence[str], values: Iterable[str] = ()) -> tuple[str, ...]:
    """Arguments: the one after a flag that sounds secret goes as well."""
    found, known = [], tuple(values)
    for index, word in enumerate(command):
        before = command[index - 1] if index else ""
        flagged = before.startswith("-") and "=" not in before and sounds_secret(before) and not word.startswith("-")
        found.append(REDACTED if flagged else text(word, known))
    return tuple(found)


def mapping(given: Mapping[str, object], values: Iterable[str] = ()) -> dict[str, str]:
    """Keys and values as text."""
    known = tuple(values)
    return {
        key: REDACTED if sounds_secret(key) and value not in (None, "", (), [], {}) else text(str(value), known)
        for key, value in given.items()
    }
