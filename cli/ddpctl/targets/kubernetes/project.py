"""Reads the files of a project that are sent to a cluster."""

import os
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from ddpctl.errors import ConfigError
from ddpctl.job.schema import FILE_NAME, SECTIONS

MOST_BYTES = 900 * 1024  # a ConfigMap holds 1 MiB
MOST_FILES = 500
# These files are sent only if a pattern is their exact path, because many users of a cluster can read a ConfigMap.
SECRETIVE = (
    "*credential*", "*secret*", "*password*", "*token*.json", "*kubeconfig*", ".env", ".env.*", "*.env", ".netrc",
    ".npmrc", ".pypirc", "*.key", "*.pem", "*.p12", "*.pfx", "*.jks", "*.keytab", "id_rsa*", "id_dsa*", "id_ecdsa*",
    "id_ed25519*", "service-account*.json", "service_account*.json",
)  # fmt: skip


def matches(path: str, globs: tuple[str, ...]) -> bool:
    """Return whether one of the patterns matches the file's path or the file's name."""
    return path in globs or any(fnmatch(path, glob) or fnmatch(path.rpartition("/")[2], glob) for glob in globs)


def is_configuration(name: str, text: str) -> bool:
    """Return whether a file is a configuration of ddpctl.

    Ranks do not need such a file, and it contains names of accounts.
    """
    if name.rpartition("/")[2] == FILE_NAME or not name.lower().endswith((".yaml", ".yml")):
        return name.rpartition("/")[2] == FILE_NAME
    try:
        keys = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return False
    return isinstance(keys, dict) and bool({"job", "targets"} & keys.keys()) and keys.keys() <= SECTIONS.keys()


def files_below(folder: Path) -> Iterator[str]:
    """Yield the paths of all files, except those in hidden folders, caches and virtual environments."""
    for top, folders, files in os.walk(folder):
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__", "node_modules")))
        yield from (str((Path(top) / name).relative_to(folder)) for name in sorted(files))


def read(folder: Path, listed: str, globs: tuple[str, ...]) -> dict[str, Any]:
    """Return ``files`` (path → text), and ``left_out`` (paths that match a pattern but look like secrets).

    ``listed``: all paths of the project, each followed by NUL, as ``git ls-files -z`` prints them. If it is empty, the
    folder is searched. Raises ConfigError if the files do not fit into a ConfigMap or are not text. Raises OSError.
    """
    names = listed.split("\0") if listed else files_below(folder)
    files: dict[str, str] = {}
    left_out: list[str] = []
    size = 0
    for name in sorted({name for name in names if name and matches(name, globs)}):
        path = folder / name
        if not path.is_file():
            continue
        is_secretive = any(fnmatch(part.lower(), glob) for part in name.split("/") for glob in SECRETIVE)
        if is_secretive and name not in globs:
            left_out.append(name)
            continue
        size += path.stat().st_size
        if size > MOST_BYTES or len(files) == MOST_FILES:
            raise ConfigError(
                f"the project is too large (with '{name}', more than {MOST_BYTES >> 10} KiB or {MOST_FILES} files): "
                "list the needed files in the target's 'project', or put them into an image (project: [])"
            )
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:
            raise ConfigError(f"'{name}' is not UTF-8 text: leave it out of the target's 'project'") from None
        if not is_configuration(name, text):
            files[name] = text
    return {"files": files, "left_out": left_out}
