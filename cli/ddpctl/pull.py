"""Brings what a run has written here: checkpoints, logs, weights; as a verb that any target can use.

A target names the places: a shell each, and the folders there. Each place is asked for its files, and sends those that
are not here yet in one stream, each from where a former pull was cut off, followed by its SHA-256. A file gets its name
here when its content has that sum. ``python -m ddpctl.pull FOLDER`` is the part of it that reads and writes files here.
"""

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ddpctl.command import Command, FilePart, Transfer, Verb
from ddpctl.errors import CannotWriteError, DdpctlError, NoInputError, UnavailableError
from ddpctl.images import human_size
from ddpctl.text import one_line
from ddpwire.exits import Exit
from ddpwire.run_files import CHECKPOINTS, HEARTBEAT, LOCK, METRICS

TRIES = 4  # a connection that was lost in the middle is made again, and resumes where it stopped
LIST_S, HERE_S = 120.0, 3600.0
STALL_S = 900.0  # the other end reads a large file once more for its sum
# What of a run's folder is no result: sent to it, or of use to living processes only. Patterns of find -path.
_SKIPPED = (
    *("./project", "./secrets", "./task-*/secrets", "./env.*", "*/.probe-*", "*/.*.part", "*/.lock"),
    *(f"*/node-*/{name}" for name in (METRICS, HEARTBEAT, LOCK)),
)
_WEIGHTS = re.compile(rf"{CHECKPOINTS}/(step-\d+)\.pt")  # ddptrain's; its manifest has the accuracy
_SUM = re.compile(r"^([0-9a-f]{64})  -$", re.MULTILINE)
_LIST = f"""\
list() {{
  cd "$1" 2>/dev/null || return 0
  find . \\( {" -o ".join(f"-path {shlex.quote(path)}" for path in _SKIPPED)} \\) -prune -o -type f -print0 |
    xargs -0 -r stat --printf "%s %Y $2%n\\\\0" || true  # a file may have gone meanwhile
}}
"""
_SEND = """\
send() {
  if [ "$(stat -c %s "$1" || echo 0)" -lt "$2" ]; then echo "$1 has become shorter" >&2; exit 66; fi
  tail -c +$(($3 + 1)) "$1" | head -c $(($2 - $3))
  head -c "$2" "$1" | sha256sum >&2
}
"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where files of a run are."""

    name: str  # for the user: a host, a pod
    shell: Command  # one that reads its script from stdin there, such as /bin/sh on a host, or by kubectl exec -i
    folders: Mapping[str, str]  # the name here ("": at the top) → the folder there, as a word of that shell


@dataclass(frozen=True, kw_only=True)
class File:
    """A file at a place."""

    path: str  # here, below the folder into which it is pulled
    place: int
    word: str  # there, as a word of the shell
    size: int
    modified: int


def pull_places(run: str, places: Sequence[Place], into: str, *, best: bool = False) -> Verb[tuple[str, ...]]:
    """Fetch all that is not here yet; lines for the user of what could not be had.

    ``best``: of the checkpoints only the one of the highest accuracy. A path that several places have is fetched from
    the first. Raises UnavailableError where not all could be fetched, which the next pull continues with.
    """
    whole: dict[str, str] = {}  # what this pull has brought or found here, with its problem
    problem = ""
    for _ in range(TRIES):
        files, silent = yield from _list(places)
        here = yield from _here(into, {"survey": sorted(files)})
        wanted = [
            file
            for path, file in files.items()
            if path not in whole and here["files"].get(path) != [file.size, file.modified]
        ]
        if best:  # the manifests come first: they tell which it is
            others = [file for file in wanted if not _WEIGHTS.fullmatch(file.path)]
            manifests = any(file.path.endswith(".json") for file in others)
            wanted = others if manifests else [file for file in wanted if file in others or file.path == here["best"]]
        if not wanted:
            if not files and silent:
                raise UnavailableError(f"nothing of {run} can be fetched: {'; '.join(silent)}")
            if not files:
                raise NoInputError(f"{run} has written nothing yet")
            return silent
        got, problem = yield from _fetch(places, wanted, into, here["parts"])
        whole |= dict.fromkeys(got, "")
        if len(got) == len(wanted) and not best:
            return silent
    raise UnavailableError(
        f"not all that {run} has written is here: {problem or 'files change while they are read'}",
        hint="the same command resumes where it stopped",
    )


def _list(places: Sequence[Place]) -> Verb[tuple[dict[str, File], tuple[str, ...]]]:
    """The files of all places, and who does not answer. Raises DdpctlError."""
    answers = yield tuple(
        replace(
            place.shell,
            stdin=_LIST
            + "".join(f"(list {word} {shlex.quote(to and f'{to}/')})\n" for to, word in place.folders.items()),
            timeout_s=LIST_S,
        )
        for place in places
    )
    files: dict[str, File] = {}
    silent = []
    for number, (place, answer) in enumerate(zip(places, answers, strict=True)):
        if answer.returncode or (answer.stderr and not answer.stdout):
            silent.append(f"{place.name}: {one_line(answer.last_line())}")
            continue
        if "\ufffd" in answer.stdout:
            silent.append(f"{place.name}: files whose names are not UTF-8 are skipped")
        for entry in answer.stdout.split("\0")[:-1]:
            if "\ufffd" in entry:
                continue
            size, modified, name = entry.split(" ", 2)
            to, _, below = name.partition("./")
            path = f"{to}{below}"
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise DdpctlError(f"{place.name} names a file outside the run's folder: {one_line(path)}")
            word = f"{place.folders[to.removesuffix('/')]}/{shlex.quote(below)}"
            file = File(path=path, place=number, word=word, size=int(size), modified=int(modified))
            files.setdefault(path, file)
    return files, tuple(silent)


def _fetch(
    places: Sequence[Place], wanted: Sequence[File], into: str, parts: Mapping[str, int]
) -> Verb[tuple[list[str], str]]:
    """One stream a place; the paths that have come whole, and what went wrong."""
    starts = {file.path: start if (start := parts.get(file.path, 0)) <= file.size else 0 for file in wanted}
    left = sum(file.size - starts[file.path] for file in wanted)
    what = f"fetching {human_size(left)}, {len(wanted):,} file{'s' * (len(wanted) > 1)} into {into}"
    if resumed := sum(starts.values()):
        what += f"; {human_size(resumed)} of them came before"
    shares = [share for number in range(len(places)) if (share := [file for file in wanted if file.place == number])]
    outputs = yield tuple(
        replace(
            places[share[0].place].shell,
            stdin=_SEND + "".join(f"send {file.word} {file.size} {starts[file.path]}\n" for file in share),
            transfer=Transfer(
                num_bytes=sum(file.size - starts[file.path] for file in share),
                num_files=len(share),
                writes=tuple(
                    FilePart(path=_part(into, file.path), start=starts[file.path], length=file.size - starts[file.path])
                    for file in share
                ),
            ),
            timeout_s=STALL_S,
            say=what,
        )
        for share in shares
    )
    finished = []
    for share, output in zip(shares, outputs, strict=True):
        sums = _SUM.findall(output.stderr)
        finished += [[file.path, file.size, file.modified, found] for file, found in zip(share, sums, strict=False)]
    done = yield from _here(into, {"finish": finished})
    problems = [
        f"{places[share[0].place].name}: {one_line(output.last_line())}"
        for share, output in zip(shares, outputs, strict=True)
        if output.returncode
    ]
    problems += [f"{path} is not what was sent" for path in done["wrong"]]
    return done["whole"], "; ".join(problems)


def _part(into: str, path: str) -> str:
    """Where a file is until it is whole."""
    return str(Path(into, path).with_name(f".{Path(path).name}.part"))


def _here(into: str, asked: Mapping[str, Any]) -> Verb[dict[str, Any]]:
    argv = (sys.executable, "-P", "-m", "ddpctl.pull", into)
    (done,) = yield (Command(argv=argv, stdin=json.dumps(asked), timeout_s=HERE_S),)
    if done.returncode:
        raise CannotWriteError(f"cannot pull into {into}: {done.last_line()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# The program: what is here, and how a file that has come gets its name


def survey(into: Path, paths: Sequence[str]) -> dict[str, Any]:
    """Which of these are here, whole or in part, and which checkpoint is the best of them."""
    files = {path: [found.st_size, int(found.st_mtime)] for path in paths if (found := _stat(into / path))}
    parts = {path: found.st_size for path in paths if (found := _stat(Path(_part(str(into), path))))}
    accuracy = {path: _accuracy(into / path) for path in paths if _WEIGHTS.fullmatch(path)}
    known = {path: value for path, value in accuracy.items() if value is not None}
    best = max(sorted(known, reverse=True), key=known.__getitem__, default=max(accuracy, default=None))
    return {"files": files, "parts": parts, "best": best}


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _accuracy(weights: Path) -> float | None:
    """What a checkpoint's manifest says."""
    try:
        value = json.loads(weights.with_suffix(".json").read_bytes())["accuracy"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, float | int) else None


def finish(into: Path, files: Sequence[tuple[str, int, int, str]]) -> dict[str, Any]:
    """Give each its name whose content has its sum; the others are removed. Raises OSError."""
    whole, wrong = [], []
    for path, size, modified, expected in files:
        part = Path(_part(str(into), path))
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected or part.stat().st_size != size:
            part.unlink()
            wrong.append(path)
            continue
        os.utime(part, (modified, modified))
        part.replace(into / path)
        whole.append(path)
    return {"whole": whole, "wrong": wrong}


def main() -> int:
    """The program."""
    asked, into = json.load(sys.stdin), Path(sys.argv[1])
    try:
        into.mkdir(parents=True, exist_ok=True)
        print(json.dumps(survey(into, asked["survey"]) if "survey" in asked else finish(into, asked["finish"])))
    except OSError as error:
        print(f"{error.filename2 or error.filename}: {error.strerror}", file=sys.stderr)
        return Exit.CANNOT_WRITE
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
