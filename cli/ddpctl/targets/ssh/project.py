"""Sends the project's folder to hosts by content: what a host has already is not sent again. A verb; touches nothing.

A host keeps one copy of each project; a run gets hard links of it, so that a later sync changes no file of a run. Under
git the files are those that git knows or would add; elsewhere all that are not hidden, and no environment or cache.
"""

import hashlib
import shlex
from collections.abc import Mapping, Sequence

from ddpctl.command import Command, Host, Output, Verb
from ddpctl.errors import CannotWriteError, NoInputError, UnavailableError
from ddpctl.targets.ssh.scripts import path_word, run_path

SEND_S = 600.0
_SUMS = "xargs -0 -r sha256sum -z --"
_FILES = (
    "if git rev-parse --is-inside-work-tree >/dev/null 2>&1; "
    "then git ls-files -z --cached --others --exclude-standard; "
    "else find . -name '.?*' -prune -o -name __pycache__ -prune -o -name venv -prune -o -type f -print0; fi"
)
_LIST = f"{{ {_FILES}; }} | {_SUMS} 2>/dev/null || true"  # git also lists what is deleted and not committed
_PACK = "set -o pipefail; tar --create --gzip --null --verbatim-files-from --files-from=- | base64 --wrap=0"


def sync(hosts: Sequence[Host], *, cwd: str, home: str, run: str) -> Verb[None]:
    """Bring ``cwd`` to every host, as the folder ``project`` of the run. Raises DdpctlError."""
    tree = f"{home.rstrip('/')}/projects/{hashlib.sha256(cwd.encode()).hexdigest()[:16]}"
    (listed,) = yield (Command(argv=("bash", "-c", _LIST), cwd=cwd, probe=True),)
    here = _sums(listed)
    if not here:
        raise NoInputError(f"project: sync: there is no file to send in {cwd}")
    look = f"mkdir -p {path_word(tree)} && cd {path_word(tree)} && find . -type f -print0 | {_SUMS}\n"
    answers = yield tuple(Command(argv=("/bin/sh",), stdin=look, host=host, timeout_s=120.0) for host in hosts)
    _expect(hosts, answers, "its copy of the project cannot be read")
    there = [_sums(answer) for answer in answers]
    changed = sorted({name for had in there for name in here if had.get(name) != here[name]})
    if changed:
        names = "".join(f"{name}\0" for name in changed)
        (packed,) = yield (Command(argv=("bash", "-c", _PACK), stdin=names, cwd=cwd, timeout_s=SEND_S),)
        if packed.returncode:
            raise NoInputError(f"the project cannot be packed: {packed.stderr.strip()}")
        unpack = f"cd {path_word(tree)} && base64 -d | tar --extract --gzip"
        answers = yield tuple(
            Command(argv=("/bin/sh", "-c", unpack), stdin=packed.stdout, host=host, timeout_s=SEND_S) for host in hosts
        )
        _expect(hosts, answers, "the project cannot be written there")
    target = path_word(run_path(home, run, "project"))
    answers = yield tuple(
        Command(argv=("/bin/sh",), stdin=_link(tree, target, sorted(had.keys() - here.keys())), host=host)
        for host, had in zip(hosts, there, strict=True)
    )
    _expect(hosts, answers, "the run's copy of the project cannot be made")


def _link(tree: str, target: str, gone: Sequence[str]) -> str:
    removed = "".join(f"rm -f -- {shlex.quote(name)}\n" for name in gone)
    return f"set -eu\ncd {path_word(tree)}\n{removed}mkdir -p $(dirname {target})\nrm -rf {target}\ncp -al . {target}\n"


def _sums(output: Output) -> Mapping[str, str]:
    """``sha256sum -z``: each file's sum by its name."""
    pairs = [entry.split(maxsplit=1) for entry in output.stdout.split("\0") if " " in entry]
    return {name.removeprefix("*").removeprefix("./"): found for found, name in pairs}


def _expect(hosts: Sequence[Host], answers: Sequence[Output], what: str) -> None:
    for host, answer in zip(hosts, answers, strict=True):
        if answer.returncode:
            why = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
            kind = UnavailableError if answer.returncode == 255 else CannotWriteError
            raise kind(f"{host}: {what}: {why}")
