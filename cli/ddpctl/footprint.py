"""What a run has left in one place, and the script that measures it or takes it away. Pure, but that a folder
here is known by its real name.

The script is the same for this machine, an SSH host and a login node. It goes into no symbolic link: a link is
removed, and what it leads to stays. The run's record goes last: what is interrupted can be asked for again.
"""

import os
import shlex
from dataclasses import dataclass

from ddpctl.command import Command, Output, Verb
from ddpctl.errors import CannotWriteError, DdpctlError, UnavailableError, UsageError
from ddpwire.exits import Exit
from ddpwire.folder import CHECKPOINTS, LOCK, RECORD

LOOK_S, REMOVE_S = 120.0, 1800.0  # a network filesystem takes its time
ALIVE = 75  # the script's code where a node of the run holds its lock
UNREACHED = 255


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """A run's folder in one place."""

    path: str  # as its machine has it; ~ is whoever logs in there
    host: str = ""  # empty: this machine
    size: int = 0  # bytes; what has another name elsewhere (a hard link) is not freed, and not counted
    checkpoints: int = 0  # of these
    stays: tuple[str, ...] = ()  # where links in it lead to

    def __str__(self) -> str:
        return f"{self.host}:{self.path}" if self.host else self.path

    def holds(self, place: str) -> bool:
        """Whether a path, or HOST:PATH, is in it. Whichever host: one home may be that of many."""
        found = [(self.path, place), (self.path, place.partition(":")[2])]
        if not self.host:
            found.append((os.path.realpath(self.path), os.path.realpath(place)))  # one folder has many names
        return any(path.startswith(f"{folder}/") for folder, path in found)


def script(word: str, *, look: bool) -> str:
    """Measure the folder that the shell's ``word`` names, and unless it is only a ``look`` remove it."""
    link = "" if look else ' && rm -f -- "$d"'
    rest = f'find "$d" -mindepth 1 -maxdepth 1 ! -name {RECORD} -exec rm -rf -- {{}} +'
    remove = "" if look else f'{rest} && rm -rf -- "$d" || exit {Exit.CANNOT_WRITE:d}\n'
    return f"""\
d={word}
if [ -L "$d" ]; then echo "stays $(readlink "$d")"{link}; exit; fi
[ -d "$d" ] || exit 0
for lock in "$d"/node-*/{LOCK} "$d"/task-*/node-*/{LOCK}; do
  if [ -e "$lock" ] && command -v flock >/dev/null && ! flock -n -s "$lock" true; then exit {ALIVE}; fi
done
sum() {{ find "$@" -type f -links 1 -exec du -k {{}} + 2>/dev/null | awk '{{ s += $1 }} END {{ print s + 0 }}'; }}
echo "size $(sum "$d")"
echo "checkpoints $(sum "$d/{CHECKPOINTS}" "$d"/task-*/{CHECKPOINTS})"
find "$d" -mindepth 1 -maxdepth 1 -type l -exec readlink {{}} \\; | sed 's/^/stays /'
{remove}"""


def read(output: Output, path: str, host: str = "") -> Footprint:
    """What the script answered. Raises DdpctlError."""
    place = str(Footprint(path=path, host=host))
    if output.returncode == ALIVE:
        raise UsageError(f"{place} was not removed: a node that is alive has it")
    if output.returncode:
        lines = output.stderr.strip().splitlines()
        why = lines[-1] if lines else f"exit code {output.returncode}"
        kind: type[DdpctlError] = UnavailableError if output.returncode == UNREACHED else CannotWriteError
        raise kind(f"{place} was not removed: {why}")
    words = [line.partition(" ") for line in output.stdout.splitlines()]
    kib = {word: int(value) for word, _, value in words if word in ("size", "checkpoints")}
    return Footprint(
        path=path,
        host=host,
        size=kib.get("size", 0) * 1024,
        checkpoints=kib.get("checkpoints", 0) * 1024,
        stays=tuple(value for word, _, value in words if word == "stays"),
    )


def here(path: str, *, look: bool) -> Verb[Footprint]:
    """Measure, or remove, a folder of this machine."""
    (output,) = yield (command(shlex.quote(path), look=look),)
    return read(output, path)


def command(word: str, *, look: bool) -> Command:
    """The script, for this machine; for another one with its host."""
    text = script(word, look=look)
    return Command(argv=("/bin/sh",), stdin=text, timeout_s=LOOK_S if look else REMOVE_S, probe=look)
