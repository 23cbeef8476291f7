"""Removes runs, with their files and processes on all machines."""

import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath

from ddpctl import targets
from ddpctl.command import SHELL, UNREACHED, Command, Host, Output, T, Verb, path_word
from ddpctl.errors import CannotWriteError, DdpctlError, UnavailableError, UsageError
from ddpctl.files.pull import MADE
from ddpctl.operations.launcher import AppContext, clear, status, target_of
from ddpctl.runs import run_store
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import DiskUsage, Run
from ddpwire import locks
from ddpwire.locks import OWNER_SUFFIX
from ddpwire.run_files import CHECKPOINTS, LOCK, RECORD

DISK_USAGE_S, REMOVE_S = 120.0, 1800.0  # for each folder, because a network filesystem may be slow
HELD = "was not removed: a live node uses it"
_Place = tuple[Host | None, str]  # a machine, and the parent of a run's folder there
_Usage = tuple[DiskUsage, ...] | DdpctlError


@dataclass(frozen=True, kw_only=True)
class Removal:
    """A run that may be removed."""

    run: Run
    state: RunStatus
    folders: tuple[DiskUsage, ...]  # its folders on all machines; the last one is its local folder


def choose_removals(context: AppContext, requested: tuple[Run, ...]) -> tuple[list[Removal], list[DdpctlError]]:
    """Return the runs that may be removed, and errors for the others. Raises UsageError if a record is unreadable."""
    every = run_store.load_all(context.root)
    if requested and (torn := run_store.unreadable(context.root, every)):
        raise UsageError(
            f"nothing was removed: {torn[0] / RECORD} cannot be read, and its run may use checkpoints of other "
            f"runs: repair that file, or delete {torn[0]}"
        )
    refused: list[DdpctlError] = []
    ended: list[tuple[Run, RunStatus]] = []
    for run, state in zip(requested, status(context, requested) if requested else (), strict=True):
        if state.state == "unknown":
            refused.append(
                UnavailableError(
                    f"run '{run.name}' was not removed, because it is unknown whether it has ended: {state.message}; "
                    f"if its machines no longer exist, delete its record: {run.folder}"
                )
            )
        elif not state.ended:
            message = f"has not ended ({state.state}) and was not removed: stop it with ddpctl stop {run.name}"
            refused.append(UsageError(f"run '{run.name}' {message}"))
        else:
            ended.append((run, state))
    measured = context.executor.perform(_disk_usage([run for run, _ in ended], dry_run=True))
    removals: list[Removal] = []
    for (run, state), folders in zip(ended, measured, strict=True):
        if isinstance(folders, DdpctlError):
            refused.append(folders)
        else:
            removals.append(Removal(run=run, state=state, folders=folders))
    users = _users(removals, every)
    going = {removal.run.name for removal in removals}
    while kept := [removal for removal in removals if users[removal.run.name] - going]:
        for removal in kept:  # a run that is not removed may use the checkpoints of others
            removals.remove(removal)
            name, named = removal.run.name, sorted(users[removal.run.name] - going)
            refused.append(
                UsageError(
                    f"run '{name}' was not removed: its checkpoints are used by {', '.join(map(repr, named))}; "
                    f"to remove these runs together, use ddpctl rm {' '.join([name, *named])}"
                )
            )
        going -= {removal.run.name for removal in kept}
    return removals, refused


def remove_runs(context: AppContext, removals: Sequence[Removal]) -> tuple[_Usage, ...]:
    """Remove the runs and their records. Return the removed folders of each run, or the error."""
    # These may leave a job, pods or orphaned processes.
    leaving = [removal.run for removal in removals if targets.may_leave(removal.run, removal.state)]
    cleared = context.executor.perform(together([clear(run) for run in leaving]))
    failed = {run.name: error for run, error in zip(leaving, cleared, strict=True) if error}
    rest = [removal.run for removal in removals if removal.run.name not in failed]
    gone = iter(context.executor.perform(_disk_usage(rest, dry_run=False)))
    return tuple(failed.get(removal.run.name) or next(gone) for removal in removals)


def _users(removals: Sequence[Removal], every: Sequence[Run]) -> dict[str, set[str]]:
    """Map each run to the runs whose checkpoints are in its folders: itself, and runs that have resumed it."""
    users: dict[str, set[str]] = {removal.run.name: set() for removal in removals}
    owners = defaultdict[str, set[str]](set)
    for removal in removals:
        for name in frozenset().union(*(place.names for place in removal.folders)):
            owners[name].add(removal.run.name)
    for run in every:
        for folder in run_store.folders_above(run.checkpoint_dir) & owners.keys():
            for owner in owners[folder]:
                users[owner].add(run.name)
    return users


def _disk_usage(runs: Sequence[Run], *, dry_run: bool) -> Verb[list[_Usage]]:
    """Measure each run's folders on all machines. Unless ``dry_run``, remove them, the local folder last."""
    away: dict[str, Sequence[_Place]] = {}
    outside: dict[_Place, str] = {}
    results: dict[str, _Usage] = {run.name: () for run in runs}
    for run in runs:
        try:
            target = target_of(run)
            away[run.name] = target.roots(run)
            outside |= dict.fromkeys(away[run.name], "" if dry_run else target.remove_outside())
        except DdpctlError as error:
            results[run.name] = error
    yield from _visit(away, results, outside, dry_run=dry_run)
    for run in runs:
        if _has_live_node(Path(run.folder)):  # this machine may have no program flock
            results[run.name] = UsageError(f"{run.folder} {HELD}")
    here = {run.name: ((None, str(PurePath(run.folder).parent)),) for run in runs}
    yield from _visit(here, results, {}, dry_run=dry_run)
    for run in runs:
        if isinstance(lost := results[run.name], UnavailableError):
            lost.hint = f"if this machine no longer exists, delete the run's record, {run.folder}"
    return [results[run.name] for run in runs]


def _has_live_node(folder: Path) -> bool:
    """Return whether a live node uses the folder. A lock that cannot be read counts as one of a live node."""
    paths = [path for pattern in ("node-*", "task-*/node-*") for path in folder.glob(f"{pattern}/{LOCK}")]
    try:
        return any(locks.is_locked(path) for path in paths)
    except FileNotFoundError:  # another rm is removing it
        return False
    except OSError:
        return True


def _visit(
    places: Mapping[str, Sequence[_Place]], results: dict[str, _Usage], outside: Mapping[_Place, str], *, dry_run: bool
) -> Verb[None]:
    """Add to ``results`` what each run without an error has in its ``places``."""
    names: dict[_Place, list[str]] = {}
    for name, roots in places.items():
        for place in () if isinstance(results[name], DdpctlError) else roots:
            names.setdefault(place, []).append(name)
    outputs = yield tuple(
        Command(
            argv=SHELL,
            stdin=disk_usage_script(root, run_names, dry_run=dry_run, outside=outside.get((host, root), "")),
            host=host,
            timeout_s=(DISK_USAGE_S if dry_run else REMOVE_S) * len(run_names),
            probe=dry_run,
        )
        for (host, root), run_names in names.items()
    )
    for ((host, root), run_names), output in zip(names.items(), outputs, strict=True):
        for name in run_names:
            try:
                known, usage = results[name], read_disk_usage(output, root, name, host)
                results[name] = known if isinstance(known, DdpctlError) else (*known, usage)
            except DdpctlError as error:
                results[name] = error


def disk_usage_script(root: str, names: Sequence[str], *, dry_run: bool, outside: str = "") -> str:
    """Return a script that measures the folders ``names`` in ``root`` and, unless ``dry_run``, removes them.

    Each line that the script prints has three fields, separated by tabs: a folder, a word and a value. For the words
    ``size`` and ``checkpoints``, the value is a size in KiB. For ``stays``, it is the target of a symbolic link, and
    for ``failed``, an error. ``held`` means that a live node uses the folder. ``outside`` is the code of
    ``Target.remove_outside``.
    """
    # It starts only a few programs, even for many folders, unless a folder cannot be removed.
    return f"""\
dry_run={"yes" if dry_run else ""}
say() {{ printf '%s\\t%s\\t%s\\n' "$@"; }}
{MADE}remove() {{ find "$@" -mindepth 1 -maxdepth 1 ! -name {RECORD} -exec rm -rf -- {{}} + && rm -rf -- "$@"; }}
{outside}cd {path_word(root)} 2>/dev/null || exit 0
set -- {shlex.join(f"./{name}" for name in names)}
for d; do
  shift
  if [ -L "$d" ]; then
    say "$d" stays "$(readlink "$d")"
    [ "$dry_run" ] || failure=$(rm -f -- "$d" 2>&1) || say "$d" failed "$failure"
  elif [ -d "$d" ]; then
    for lock in "$d"/node-*/{LOCK} "$d"/task-*/node-*/{LOCK}; do
      if [ -f "$lock" ] && command -v flock >/dev/null; then
        flock -n -s "$lock" true 2>/dev/null && continue
        # 1: it is locked. Otherwise there are no locks here, and a live node writes its record every 10 s.
        if [ $? -eq 1 ] || [ "$(find "$lock{OWNER_SUFFIX}" -mmin -1 2>/dev/null)" ]; then
          say "$d" held ""
          continue 2
        fi
      fi
    done
    summary=$(cd "$d" && made_summary)
    [ -z "$summary" ] || say "$d" made "$summary"
    set -- "$@" "$d"
  fi
done
[ $# -gt 0 ] || exit 0
find "$@" -type f -links 1 -exec du -k {{}} + 2>/dev/null | awk -F/ '
  {{ size[$2] += $1 }}
  $3 == "{CHECKPOINTS}" || ($3 ~ /^task-/ && $4 == "{CHECKPOINTS}") {{ saved[$2] += $1 }}
  END {{
    for (d in size) printf "./%s\\tsize\\t%.0f\\n./%s\\tcheckpoints\\t%.0f\\n", d, size[d], d, saved[d]
  }}'
find "$@" -mindepth 1 -maxdepth 1 -type l | while IFS= read -r link; do
  say "${{link%/*}}" stays "$(readlink "$link")"
done
[ "$dry_run" ] || remove "$@" 2>/dev/null || for d; do
  [ ! -e "$d" ] || failure=$(remove "$d" 2>&1) || [ ! -e "$d" ] || say "$d" failed "$(printf %s "$failure" | tail -n 1)"
done
"""


def read_disk_usage(output: Output, root: str, name: str, host: Host | None = None) -> DiskUsage:
    """Return the disk usage of the folder ``name`` from the output of ``disk_usage_script``. Raises DdpctlError."""
    pairs = re.findall(rf"(?m)^\./{re.escape(name)}\t(\w+)\t(.*)$", output.stdout)
    values = dict(pairs)
    usage = DiskUsage(
        path=f"{root}/{name}",
        host=str(host or ""),
        size=int(values.get("size", 0)) * 1024,
        checkpoints=int(values.get("checkpoints", 0)) * 1024,
        made=values.get("made", ""),
        stays=tuple(value for key, value in pairs if key == "stays"),
    )
    if "held" in values:
        raise UsageError(f"{usage} {HELD}")
    if "failed" in values or output.returncode:
        kind = UnavailableError if output.returncode == UNREACHED else CannotWriteError
        raise kind(f"{usage} was not removed: {values.get('failed') or output.last_line()}")
    return usage


def together(verbs: Sequence[Verb[T]]) -> Verb[tuple[T | DdpctlError, ...]]:
    """Run verbs in parallel. Return the result or the error of each verb."""
    results: dict[int, T | DdpctlError] = {}
    answered: dict[int, tuple[Output, ...] | None] = dict.fromkeys(range(len(verbs)))
    while answered:
        commands_of: dict[int, tuple[Command, ...]] = {}
        for index, outputs in answered.items():
            try:
                commands_of[index] = next(verbs[index]) if outputs is None else verbs[index].send(outputs)
            except StopIteration as stop:
                results[index] = stop.value
            except DdpctlError as error:
                results[index] = error
        every = iter((yield tuple(command for commands in commands_of.values() for command in commands)))
        answered = {index: tuple(islice(every, len(commands))) for index, commands in commands_of.items()}
    return tuple(results[index] for index in range(len(verbs)))
