"""Taking runs away for good: which of them may go, what goes with each, and in which order."""

from collections.abc import Collection
from dataclasses import dataclass

from ddpctl import footprint, launch, runs, targets
from ddpctl.desk import Desk
from ddpctl.errors import DdpctlError, UnavailableError, UsageError
from ddpctl.footprint import Footprint
from ddpctl.run import Run, RunStatus
from ddpwire.folder import RECORD


@dataclass(frozen=True, kw_only=True)
class Leaver:
    """A run that may go."""

    run: Run
    state: RunStatus
    left: tuple[Footprint, ...]  # what goes with it, everywhere; the last is its folder here


def choose(desk: Desk, asked: tuple[Run, ...]) -> tuple[tuple[Leaver, ...], tuple[DdpctlError, ...]]:
    """Who of them may go, and why the others may not. Raises UsageError where a record cannot be read."""
    if asked and (torn := runs.unreadable(desk.root)):
        raise UsageError(
            f"{torn[0] / RECORD} cannot be read, so that nobody knows whose checkpoints that run goes on from: "
            f"nothing is removed before it is mended, or {torn[0]} taken away by hand"
        )
    leavers: list[Leaver] = []
    refused: list[DdpctlError] = []
    for run, state in zip(asked, launch.status(desk, asked) if asked else (), strict=True):
        try:
            _check_ended(run, state)
            leavers.append(Leaver(run=run, state=state, left=_everywhere(desk, run, look=True)))
        except DdpctlError as error:
            refused.append(error)
    while kept := [
        (one, heirs) for one in leavers if (heirs := _heirs(desk, one, {each.run.name for each in leavers}))
    ]:
        for one, heirs in kept:  # who is kept may be the heir of another
            leavers.remove(one)
            refused.append(
                UsageError(
                    f"{one.run.name} has the checkpoints of {', '.join(heirs)}, and was not removed: "
                    f"ddpctl rm {' '.join([one.run.name, *heirs])} removes all of them"
                )
            )
    return tuple(leavers), tuple(refused)


def remove(desk: Desk, one: Leaver) -> tuple[Footprint, ...]:
    """Take it away where it ran, and when that is done its record. Raises DdpctlError."""
    if one.state.remains or one.state.state == "lost":  # a job and its pods; processes that a killed ddprun left
        launch.clear(desk, one.run)
    return _everywhere(desk, one.run, look=False)


def _check_ended(run: Run, state: RunStatus) -> None:
    """Raises UsageError for a run that goes on, UnavailableError for one of which nobody knows whether it does."""
    if state.state == "unknown":
        raise UnavailableError(
            f"{run.name} cannot be asked whether it goes on, and was not removed: {state.message}; "
            f"if what it ran on is gone for good, delete its record: {run.folder}"
        )
    if not state.ended:
        raise UsageError(f"{run.name} goes on ({state.state}), and was not removed: ddpctl stop {run.name} ends it")


def _heirs(desk: Desk, one: Leaver, going: Collection[str]) -> list[str]:
    """The runs that stay and have their checkpoints in what would go: those that resumed it."""
    staying = [other for other in runs.load_all(desk.root) if other.name not in going]
    return sorted(other.name for other in staying if any(place.holds(other.checkpoint_dir) for place in one.left))


def _everywhere(desk: Desk, run: Run, *, look: bool) -> tuple[Footprint, ...]:
    target = launch.target_of(run)
    there = desk.runner.perform(target.remove(run, look=look)) if isinstance(target, targets.Leaving) else ()
    return (*there, desk.runner.perform(footprint.here(run.folder, look=look)))
