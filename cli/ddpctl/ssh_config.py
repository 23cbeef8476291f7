"""What ~/.ssh/config and the known_hosts files say of a host, as OpenSSH reads them. Connects to nothing.

paramiko parses the configuration but neither ``Include`` nor patterns and markers of known_hosts.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from paramiko import PKey, SSHConfig
from paramiko.hostkeys import HostKeyEntry, HostKeys
from paramiko.ssh_exception import SSHException

from ddpctl.errors import ConfigError

MAX_DEPTH = 16  # OpenSSH's own limit of an Include in an Include
SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
_INCLUDE = re.compile(r"\s*include(?:\s+|\s*=\s*)(.+)", re.IGNORECASE)
_BLOCK = re.compile(r"\s*(host|match)\b", re.IGNORECASE)
_KNOWN_HOSTS = {
    "userknownhostsfile": "~/.ssh/known_hosts ~/.ssh/known_hosts2",
    "globalknownhostsfile": "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2",
}


def read_config(home: Path) -> SSHConfig:
    """The person's configuration, then the system's. Raises ConfigError."""
    paths = [home / ".ssh" / "config", SYSTEM_CONFIG]
    try:
        # Each file begins outside of every block, wherever the one before it has ended.
        text = "\n".join(f"Host *\n{_unfolded(path, home)}" for path in paths if path.is_file())
        return SSHConfig.from_text(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"~/.ssh/config cannot be read: {error}") from None
    except Exception as error:  # paramiko's ConfigParseError, and invoke's where a Match runs a program
        raise ConfigError(f"~/.ssh/config: {error}") from None


def _unfolded(path: Path, home: Path, depth: int = 0) -> str:
    """A file's text with what it includes in the place of each Include."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{path}: Include in an Include, more than {MAX_DEPTH} deep")
    lines, block = [], "Host *"
    for line in path.read_text(errors="replace").splitlines():
        if _BLOCK.match(line):
            block = line
        if match := _INCLUDE.fullmatch(line):
            for pattern in match[1].split():
                lines += [_unfolded(part, home, depth + 1) for part in _files(pattern.strip('"'), path, home)]
            lines.append(block)  # what follows belongs to the block that the Include stands in
        else:
            lines.append(line)
    return "\n".join(lines)


def _files(pattern: str, path: Path, home: Path) -> list[Path]:
    """The files of an Include; a relative one lies in ~/.ssh, in the system's file in /etc/ssh."""
    if pattern.startswith("~/"):
        pattern = str(home / pattern[2:])
    folder = SYSTEM_CONFIG.parent if path.is_relative_to(SYSTEM_CONFIG.parent) else home / ".ssh"
    whole = folder / pattern  # an absolute pattern stays what it is
    return sorted(found for found in Path(whole.anchor).glob(str(whole.relative_to(whole.anchor))) if found.is_file())


@dataclass(frozen=True, kw_only=True)
class KnownKeys:
    """What known_hosts says of one host."""

    keys: tuple[PKey, ...]
    revoked: tuple[PKey, ...]


def known_hosts_files(said: Mapping[str, Any], home: Path) -> tuple[Path, ...]:
    """The files that the configuration of a host names."""
    words = [word for key, default in _KNOWN_HOSTS.items() for word in str(said.get(key, default)).split()]
    return tuple(home / word[2:] if word.startswith("~/") else Path(word) for word in words if word != "none")


def known_keys(files: Iterable[Path], name: str) -> KnownKeys:
    """The keys of a host, by the name that known_hosts has for it: ``box1``, or ``[box1]:2222``."""
    keys: list[PKey] = []
    revoked: list[PKey] = []
    for marker, names, line in _entries(files):
        if _matches(names, name.lower()) and (key := _key(line)) is not None:
            (revoked if marker == "@revoked" else keys).append(key)
    return KnownKeys(keys=tuple(keys), revoked=tuple(revoked))


def _entries(files: Iterable[Path]) -> Iterator[tuple[str, list[str], str]]:
    """Each line's marker, its names, and what is left of it without the marker."""
    for path in files:
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue  # as OpenSSH: most of the four are not there
        for line in lines:
            words = line.split()
            marker = words.pop(0) if words and words[0].startswith("@") else ""
            # Certificates of hosts are not supported: such a host counts as unknown.
            if words and not words[0].startswith("#") and marker != "@cert-authority":
                yield marker, words[0].split(","), " ".join(words)


def _key(line: str) -> PKey | None:
    try:
        entry = HostKeyEntry.from_line(line)
    except SSHException:
        return None
    return entry.key if entry else None


def _matches(patterns: Iterable[str], name: str) -> bool:
    found = False
    for pattern in patterns:
        if pattern.startswith("|1|"):
            found = found or HostKeys.hash_host(name, pattern) == pattern
        elif pattern.startswith("!") and fnmatchcase(name, pattern[1:].lower()):
            return False
        else:
            literal = pattern.lower().replace("[", "[[]")  # [box1]:22 is a name, no set of characters
            found = found or fnmatchcase(name, literal)
    return found
