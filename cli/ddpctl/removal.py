"""Removes runs: determines which runs may be removed, what is removed with each, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from ddpctl import run_store, targets
from ddpctl.command import Command, Output, T, Verb
from ddpctl.errors import DdpctlError, UnavailableError, UsageError
from ddpctl.launcher import AppContext, clear, status, target_of
from ddpctl.run_status import RunStatus
from ddpctl.run_store import DiskUsage, Run
from ddpwire.run_files import RECORD


@dataclass(frozen=True, kw_only=True)
class Removal:
    """A run that may be removed."""

    run: Run
    state: RunStatus
    left: tuple[DiskUsage, ...]  # what is removed with it, on all machines; the last is its local folder


def choose_removals(context: AppContext, asked: tuple[Run, ...]) -> tuple[tuple[Removal, ...], tuple[DdpctlError, ...]]:
    """Return which runs may be removed, and why the others may not. Raises UsageError if a record is unreadable."""
    every = run_store.load_all(context.root)
    if asked and (torn := run_store.unreadable(context.root, every)):
        raise UsageError(
            f"{torn[0] / RECORD} cannot be read, so that nobody knows whose checkpoints that run continues from: "
            f"nothing is removed before it is mended, or {torn[0]} deleted by hand"
        )
    refused: list[DdpctlError] = []
    ended: list[tuple[Run, RunStatus]] = []
    for run, state in zip(asked, status(context, asked) if asked else (), strict=True):
        try:
            _check_ended(run, state)
            ended.append((run, state))
        except DdpctlError as error:
            refused.append(error)
    measured = context.executor.perform(together([_disk_usage_everywhere(run, dry_run=True) for run, _ in ended]))
    removals: list[Removal] = []
    for (run, state), left in zip(ended, measured, strict=True):
        if isinstance(left, DdpctlError):
            refused.append(left)
        else:
            removals.append(Removal(run=run, state=state, left=left))
    users = _users(removals, every)
    while kept := [one for one in removals if users[one.run.name] - {each.run.name for each in removals}]:
        going = {one.run.name for one in removals}
        for one in kept:  # a run that is kept may use the checkpoints of others
            removals.remove(one)
            named = sorted(users[one.run.name] - going)
            refused.append(
                UsageError(
                    f"run '{one.run.name}' was not removed: its checkpoints are used by {', '.join(named)}; "
                    f"ddpctl rm {' '.join([one.run.name, *named])} removes these runs"
                )
            )
    return tuple(removals), tuple(refused)


def remove_runs(context: AppContext, removals: Sequence[Removal]) -> tuple[tuple[DiskUsage, ...] | DdpctlError, ...]:
    """Remove runs where they ran, and then their records. Return for each what is gone, or why it is not."""
    return context.executor.perform(together([_remove(one) for one in removals]))


def _remove(one: Removal) -> Verb[tuple[DiskUsage, ...]]:
    if targets.may_leave(one.run, one.state):  # a job and its pods; processes that a killed ddprun left
        yield from clear(one.run)
    return (yield from _disk_usage_everywhere(one.run, dry_run=False))


def _check_ended(run: Run, state: RunStatus) -> None:
    """Raise UsageError if the run has not ended, or UnavailableError if this is unknown."""
    if state.state == "unknown":
        raise UnavailableError(
            f"run '{run.name}' was not removed, because it is unknown whether it has ended: {state.message}; "
            f"if its machines no longer exist, delete its record: {run.folder}"
        )
    if not state.ended:
        raise UsageError(
            f"run '{run.name}' has not ended ({state.state}) and was not removed: stop it with ddpctl stop {run.name}"
        )


def _users(removals: Sequence[Removal], every: Sequence[Run]) -> dict[str, set[str]]:
    """Map each run to the runs whose checkpoints would be removed with it: itself, and the runs that resumed it."""
    owners: dict[str, set[str]] = {}
    for one in removals:
        for name in frozenset().union(*(place.names for place in one.left)):
            owners.setdefault(name, set()).add(one.run.name)
    users: dict[str, set[str]] = {one.run.name: set() for one in removals}
    for run in every:
        for folder in run_store.folders_above(run.checkpoint_dir):
            for owner in owners.get(folder, ()):
                users[owner].add(run.name)
    return users


def _disk_usage_everywhere(run: Run, *, dry_run: bool) -> Verb[tuple[DiskUsage, ...]]:
    there = yield from target_of(run).remove(run, dry_run=dry_run)
    return (*there, run_store.local_disk_usage(run.folder, dry_run=dry_run))


def together(verbs: Sequence[Verb[T]]) -> Verb[tuple[T | DdpctlError, ...]]:
    """Run several verbs in parallel; return the result of each, or the error that ended it."""
    results: dict[int, T | DdpctlError] = {}
    answered: dict[int, tuple[Output, ...] | None] = dict.fromkeys(range(len(verbs)))
    while answered:
        asked: dict[int, tuple[Command, ...]] = {}
        for index, outputs in answered.items():
            try:
                asked[index] = next(verbs[index]) if outputs is None else verbs[index].send(outputs)
            except StopIteration as stop:
                results[index] = stop.value
            except DdpctlError as error:
                results[index] = error
        every = iter((yield tuple(command for commands in asked.values() for command in commands)))
        answered = {index: tuple(islice(every, len(commands))) for index, commands in asked.items()}
    return tuple(results[index] for index in range(len(verbs)))
