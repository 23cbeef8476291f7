"""Fetches the files that a run has written (checkpoints, logs, weights), for all targets.

Each place (a host or a pod) lists its files, and sends the missing files in one stream, with their SHA-256. An
interrupted transfer continues where it stopped. A file gets its final name only if its checksum is right.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ddpctl.command import Command, FilePart, Transfer, Verb, call
from ddpctl.errors import CannotWriteError, DdpctlError, NoInputError, UnavailableError
from ddpctl.files.images import human_size
from ddpctl.text import one_line
from ddpwire.run_files import CHECKPOINTS, LOCK, STORE_SECRET, publish_part

TRIES = 4  # a lost connection is opened again, and the transfer is resumed
MAX_NAMED = 3  # files in a message
LIST_S = 120.0
STALL_S = 900.0  # the other end reads a large file again for its checksum
# Patterns of find -path: files in a run's folder that ddpctl has sent there, or that only running processes use.
_SKIPPED = (
    *("./project", "./project.list", "./secrets", f"./{STORE_SECRET}", "./env.*", "*/.probe-*", "*/.*.part", "*/.lock"),
    *(f"./task-*/{name}" for name in ("secrets", STORE_SECRET)),
    f"*/node-*/{LOCK}",
)
_WEIGHTS = re.compile(rf"{CHECKPOINTS}/(step-\d+)\.pt")  # a checkpoint of ddptrain
_SUM = re.compile(r"^([0-9a-f]{64})  -$", re.MULTILINE)
# In a run's folder: print the files that its script has made or changed in the folder ``project``. project.list names
# those that ddpctl has sent, and has the time of that.
MADE = """\
made() {
  [ -f project.list ] || return 0
  (cd project || exit
    set -- . -type f ! -path '*
*'
    find "$@" -newer ../project.list
    find "$@" | LC_ALL=C sort | LC_ALL=C comm -13 ../project.list -) |
    LC_ALL=C grep -a -v /__pycache__/ | LC_ALL=C sort -u | LC_ALL=C sed -n 's,^[.]/,./project/,p'
}
made_summary() {
  made | awk 'NR < 4 { names = names (NR > 1 ? ", " : "") substr($0, 3) }
    END { if (NR) print NR (NR > 1 ? " files" : " file") ": " names (NR > 3 ? ", ..." : "") }'
}
"""
_LIST = f"""\
{MADE}list() {{
  cd "$1" 2>/dev/null || return 0
  find . \\( {" -o ".join(f"-path {shlex.quote(path)}" for path in _SKIPPED)} \\) -prune -o \\
    \\( -type f -o -type l \\) -print0 |
    LC_ALL=C xargs -0 -r stat --printf "%s %Y %F:$2%n\\\\0" || true  # a file may have been removed
  made | LC_ALL=C xargs -d '\\n' -r stat --printf "%s %Y %F:$2%n\\\\0" || true
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
    """A place that has files of a run."""

    name: str  # shown to the user: a host or a pod
    shell: Command  # a shell there that reads its script from stdin: /bin/sh on a host, or through kubectl exec -i
    folders: Mapping[str, str]  # the local name ("": the top folder) → the folder there, as a word of that shell


@dataclass(frozen=True, kw_only=True)
class File:
    """A file on a machine."""

    path: str  # on this machine, below the folder of the pull
    place: int  # the index of its place
    word: str  # the path there, as a word of the shell
    size: int
    modified: int


def pull_places(run: str, places: Sequence[Place], into: str, *, best: bool = False) -> Verb[tuple[str, ...]]:
    """Fetch the files that are missing in ``into``. Return one line for each place or file that was skipped.

    If ``best``, leave out all checkpoints except the one with the highest accuracy. If several places have a file with
    the same path, fetch it from the first place. Raises UnavailableError if a transfer failed, and NoInputError if
    there are no files yet.
    """
    whole: set[str] = set()  # the paths that this pull has fetched
    problem = ""
    for _ in range(TRIES):
        files, silent, links = yield from _list(places)
        here = yield from _here(survey, into, sorted(files), say=links)
        wanted = [
            file
            for path, file in files.items()
            if path not in whole and here["files"].get(path) != [file.size, file.modified]
        ]
        if best:  # fetch the manifests first: they contain the accuracy
            others = [file for file in wanted if not _WEIGHTS.fullmatch(file.path)]
            manifests = any(file.path.endswith(".json") for file in others)
            wanted = others if manifests else [file for file in wanted if file in others or file.path == here["best"]]
        if not wanted:
            if not files and silent:
                raise UnavailableError(f"nothing of {run} can be fetched: {'; '.join(silent)}")
            if not files:
                raise NoInputError(f"{run} has written nothing")
            return silent
        got, problem = yield from _fetch(places, wanted, into, here["parts"])
        whole.update(got)
        if len(got) == len(wanted) and not best:
            return silent
    reason, hint = problem or "files change while they are read", "the same command resumes where it stopped"
    raise UnavailableError(f"not all files of {run} were fetched: {reason}", hint=hint)


def _list(places: Sequence[Place]) -> Verb[tuple[dict[str, File], tuple[str, ...], str]]:
    """Return a dictionary from path to file, lines about skipped places and files, and a line about symbolic links."""
    calls = (
        "".join(f"(list {word} {shlex.quote(to and f'{to}/')})\n" for to, word in place.folders.items())
        for place in places
    )
    answers = yield tuple(
        replace(place.shell, stdin=_LIST + text, timeout_s=LIST_S) for place, text in zip(places, calls, strict=True)
    )
    files: dict[str, File] = {}
    silent, links = [], []
    for number, (place, answer) in enumerate(zip(places, answers, strict=True)):
        if answer.returncode or (answer.stderr and not answer.stdout):
            silent.append(f"{place.name}: {one_line(answer.last_line())}")
            continue
        if "\ufffd" in answer.stdout:
            silent.append(f"{place.name}: files whose names are not UTF-8 are skipped")
        for entry in answer.stdout.split("\0")[:-1]:
            if "\ufffd" in entry:
                continue
            size, modified, kind_name = entry.split(" ", 2)
            kind, _, name = kind_name.partition(":")
            if kind == "symbolic link":
                links.append(f"{place.name}:{name.replace('./', '', 1)}")
                continue
            to, _, below = name.partition("./")
            path = f"{to}{below}"
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise DdpctlError(f"{place.name} names a file outside the run's folder: {one_line(path)}")
            word = f"{place.folders[to.removesuffix('/')]}/{shlex.quote(below)}"
            file = File(path=path, place=number, word=word, size=int(size), modified=int(modified))
            files.setdefault(path, file)
    return files, tuple(silent), one_line(f"symbolic links are not fetched: {', '.join(links)}") if links else ""


def _fetch(
    places: Sequence[Place], wanted: Sequence[File], into: str, parts: Mapping[str, int]
) -> Verb[tuple[list[str], str]]:
    """Fetch files in one stream per place. Return the paths of the complete files, and the errors as text."""
    rests: dict[str, FilePart] = {}
    for file in wanted:
        start = parts.get(file.path, 0)
        start = start if start <= file.size else 0
        rests[file.path] = FilePart(path=_part(into, file.path), start=start, length=file.size - start)
    size = human_size(sum(rest.length for rest in rests.values()))
    say = f"fetching {size}, {len(wanted):,} file{'s' * (len(wanted) > 1)} into {into}"
    if resumed := sum(rest.start for rest in rests.values()):
        say += f"; {human_size(resumed)} were fetched earlier"
    if own := [file.path for file in wanted if file.path.startswith("project/")]:
        names = ", ".join(own[:MAX_NAMED]) + ", ..." * (len(own) > MAX_NAMED)
        say += f"; files that the script has made in its folder: {one_line(names)}"
    shares = [share for number in range(len(places)) if (share := [file for file in wanted if file.place == number])]
    outputs = yield tuple(
        replace(
            places[share[0].place].shell,
            stdin=_SEND + "".join(f"send {file.word} {file.size} {rests[file.path].start}\n" for file in share),
            transfer=Transfer(
                num_bytes=sum(rests[file.path].length for file in share),
                num_files=len(share),
                writes=tuple(rests[file.path] for file in share),
            ),
            timeout_s=STALL_S,
            say=say,
        )
        for share in shares
    )
    finished = []
    for share, output in zip(shares, outputs, strict=True):
        sums = _SUM.findall(output.stderr)
        finished += [[file.path, file.modified, digest] for file, digest in zip(share, sums, strict=False)]
    done = yield from _here(finish, into, finished)
    problems = [
        f"{places[share[0].place].name}: {one_line(output.last_line())}"
        for share, output in zip(shares, outputs, strict=True)
        if output.returncode
    ]
    problems += [f"{path} has a wrong checksum" for path in done["wrong"]]
    return done["whole"], "; ".join(problems)


def _part(into: str, path: str) -> str:
    return str(Path(into, path).with_name(f".{Path(path).name}.part"))


def _here(function: Callable[..., Any], into: str, files: Sequence[Any], *, say: str = "") -> Verb[dict[str, Any]]:
    (done,) = yield (call(function, Path(into), files, say=say),)
    done.check(f"cannot pull into {into}", CannotWriteError)
    listing: dict[str, Any] = done.value
    return listing


def survey(into: Path, paths: Sequence[str]) -> dict[str, Any]:
    """Return which files in ``paths`` are complete and which are partial, and which checkpoint is the best.

    Create the folder ``into``. Raises OSError.
    """
    into.mkdir(parents=True, exist_ok=True)
    files = {path: [status.st_size, int(status.st_mtime)] for path in paths if (status := _stat(into / path))}
    parts = {path: status.st_size for path in paths if (status := _stat(Path(_part(str(into), path))))}
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
    try:
        value = json.loads(weights.with_suffix(".json").read_bytes())["accuracy"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, float | int) else None


def finish(into: Path, files: Sequence[tuple[str, int, str]]) -> dict[str, Any]:
    """Rename the files with the right checksum to their final names, and remove the others. Raises OSError."""
    whole: list[str] = []
    wrong: list[str] = []
    for path, modified, expected in files:
        is_whole = publish_part(Path(_part(str(into), path)), into / path, expected, modified * 10**9)
        (whole if is_whole else wrong).append(path)
    return {"whole": whole, "wrong": wrong}
