"""The verbs' order: plan, submit, follow, stop. Composes targets, runner and records; prints only what happens."""

import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from ddpctl import discovery, runs, targets
from ddpctl.desk import Desk, Request
from ddpctl.errors import CannotWriteError, ConfigError, DdpctlError, NoInputError, UnavailableError, UsageError
from ddpctl.plan import Plan, title
from ddpctl.run import Run, RunStatus
from ddpctl.targets import LogQuery
from ddpwire.exits import Exit
from ddpwire.folder import CHECKPOINTS
from ddpwire.version import __version__

SETTLE_S = 10.0  # how long after its last log line a run may take to be seen ended
STOP_MARGIN_S = 5.0  # what a run may take beyond its ranks' grace
SILENT_S = 1.0  # a run of which nothing is alive has had its last word after so long
PROGRESS_S = 5.0
POLL_S = 0.2


def plan_of(request: Request, run: str, folder: Path) -> Plan:
    """The request as a plan for one run."""
    checkpoint_dir = request.resumes.checkpoint_dir if request.resumes else str(folder / CHECKPOINTS)
    return Plan(run=run, job=request.job, cwd=request.cwd, run_dir=str(folder), checkpoint_dir=checkpoint_dir)


def check_alone(desk: Desk, old: Run) -> None:
    """See that no run goes on in the checkpoints of one that is to be resumed. Raises UsageError."""
    sharing = tuple(run for run in runs.load_all(desk.root) if run.checkpoint_dir == old.checkpoint_dir)
    for state in status(desk, sharing):
        if not state.ended and (state.state != "unknown" or state.run == old.name):
            raise UsageError(
                f"--resume: {state.run} goes on, and two trainings in its checkpoints would mix: stop it first"
            )


def rehearse(desk: Desk, request: Request) -> None:
    """Print what a launch would run, and run nothing that changes anything."""
    name = _name(desk, request)
    plan = plan_of(request, name, desk.root / name)
    target = targets.make(request.kind, request.options)
    verb = target.rehearse(plan) if isinstance(target, targets.Rehearsing) else target.submit(plan, attached=True)
    submission = desk.runner.rehearse(verb, sys.stdout)
    for line in (*submission.table, submission.note):
        if line:
            desk.say(f"# {line}")


def start(desk: Desk, request: Request, *, attached: bool) -> Run:
    """Start a run and keep its record; a run that cannot start leaves nothing behind."""
    target = targets.make(request.kind, request.options)
    name = _name(desk, request)
    folder = runs.create(desk.root, name, resumes=request.resumes is not None)
    plan = plan_of(request, name, folder)
    run = Run(
        name=name,
        created=time.time(),
        target=request.target,
        kind=request.kind,
        options=asdict(request.options),
        job=request.job,
        cwd=request.cwd,
        folder=str(folder),
        checkpoint_dir=plan.checkpoint_dir,
        version=__version__,
    )
    try:
        runs.save(run)
        submission = desk.runner.perform(target.submit(plan, attached=attached))
        checkpoint_dir = submission.checkpoint_dir or run.checkpoint_dir
        run = replace(run, handle=submission.handle, checkpoint_dir=checkpoint_dir)
        runs.save(run)
    except BaseException as error:
        desk.runner.kill_started()
        if not (isinstance(error, DdpctlError) and error.nothing_started):
            with suppress(DdpctlError):  # what went wrong first is what a person must read
                desk.runner.perform(target.stop(run, kill=True))
        runs.discard(folder)
        raise
    where = request.kind if request.target == request.kind else f"{request.target}, {request.kind}"
    desk.say(f"run {name}: {title(request.job)} on {where} ({request.why})")
    for line in (*submission.table, submission.note):
        if line:
            desk.say(f"  {line}")
    return run


def _name(desk: Desk, request: Request) -> str:
    if request.name:
        return request.name
    return (
        runs.next_name(desk.root, request.resumes.name)
        if request.resumes
        else runs.new_name(desk.root, request.job.name)
    )


def follow(desk: Desk, run: Run, *, tail: int | None = None) -> tuple[RunStatus, int]:
    """Print a run's logs (``tail``: from the last lines on) until it ends; how it ended, and ddpctl's exit code.

    Ctrl-C once lets it save and stop, twice kills it; the code is then that of an interruption.
    """
    target, stopper = target_of(run), Stopper(desk, run)
    logs = target.logs(run, LogQuery(follow=True, tail=tail))
    if isinstance(target, targets.Outliving):
        try:
            desk.runner.perform(logs)
        except KeyboardInterrupt:
            return RunStatus(run=run.name, state="training", message=target.farewell(run)), Exit.INTERRUPTED
    else:
        with suppress(CannotWriteError):  # the run goes on, whoever reads its log
            desk.runner.perform(logs, on_interrupt=stopper)
    state = _see_the_end(desk, run, stopper)
    if state.state == "unknown":
        desk.say(f"{run.name} cannot be asked any more, and goes on if it did: ddpctl attach {run.name}")
        return state, Exit.UNAVAILABLE
    if stopper.times:
        return state, Exit.INTERRUPTED
    return state, Exit.KILLED if state.code is None else state.code


def _see_the_end(desk: Desk, run: Run, stopper: "Stopper") -> RunStatus:
    """Its last word may take a moment; and where its log could not be printed to the end, the run still goes on."""
    if (state := status(desk, (run,))[0]).alive:
        time.sleep(SILENT_S)
    state = _wait_until_ended(desk, run, SETTLE_S) if not state.alive else status(desk, (run,))[0]
    if state.alive:
        desk.say(f"the log cannot be printed any further; {run.name} goes on, and Ctrl-C stops it")
    while state.alive:
        try:
            time.sleep(POLL_S)
            state = status(desk, (run,))[0]
        except KeyboardInterrupt:
            stopper()
    return state


class Stopper:
    """What Ctrl-C does to an attached run: the first time it saves and stops, the second time it is killed."""

    def __init__(self, desk: Desk, run: Run) -> None:
        self._desk, self._run = desk, run
        self.times = 0

    def __call__(self) -> None:
        """One Ctrl-C."""
        self.times += 1
        if self.times == 1:
            self._desk.say(
                f"stopping {self._run.name}: its ranks have {self._run.job.grace:g} s to save; Ctrl-C again kills them"
            )
        else:
            self._desk.say(f"killing {self._run.name}")
        kill = self.times > 1
        try:
            self._desk.runner.perform(target_of(self._run).stop(self._run, kill=kill, wait=kill))
        except UnavailableError as error:  # some of its machines; what goes on elsewhere is still to be seen
            self._desk.say(str(error))


def stop(desk: Desk, run: Run, *, kill: bool) -> RunStatus:
    """Let a run save and stop, kill it when its grace is over, and see that nothing of it is left."""
    target = target_of(run)
    if not kill:
        desk.say(
            f"stopping {run.name}: its ranks have {run.job.grace:g} s to save; "
            f"ddpctl stop --kill {run.name} ends them at once"
        )
        desk.runner.perform(target.stop(run, kill=False, wait=False))
        state = _wait_until_ended(desk, run, run.job.grace + STOP_MARGIN_S)
        if state.ended:
            return state
        if state.alive:
            desk.say(f"{run.name} did not stop within its grace: killing it")
    if not desk.runner.perform(target.stop(run, kill=True)):
        raise DdpctlError(f"{run.name} is still alive after it was killed: see ddpctl status {run.name}")
    return _wait_until_ended(desk, run, SETTLE_S)


def clear(desk: Desk, run: Run) -> None:
    """Take away what a run that has ended has left where it ran."""
    if not desk.runner.perform(target_of(run).stop(run, kill=True)):
        raise DdpctlError(f"something of {run.name} is left: see ddpctl status {run.name}")


def _wait_until_ended(desk: Desk, run: Run, limit_s: float) -> RunStatus:
    started = said = time.monotonic()
    while not (state := status(desk, (run,))[0]).ended and (now := time.monotonic()) < started + limit_s:
        if not state.alive and state.state != "stopping" and now - started > SILENT_S:
            break
        if now - said >= PROGRESS_S:
            said = now
            desk.say(f"  waiting for {run.name}: {now - started:.0f} of {limit_s:g} s, {state.message}")
        time.sleep(POLL_S)
    return state


def execute(desk: Desk, run: Run, *, node: int, argv: tuple[str, ...], tty: bool) -> int:
    """Run a command where a node of the run is. Raises NoInputError for a node that there is not."""
    if not 0 <= node < run.job.max_nodes:
        raise NoInputError(f"--node {node}: the nodes of {run.name} are 0 to {run.job.max_nodes - 1}")
    return desk.runner.perform(target_of(run).execute(run, node=node, argv=argv, tty=tty))


def pull(desk: Desk, run: Run, into: Path) -> None:
    """Bring what a run has written into a folder here. Raises ConfigError where it is reached without."""
    target = target_of(run)
    if not isinstance(target, targets.Pulling):
        where = run.checkpoint_dir if run.elsewhere else run.folder
        raise ConfigError(f"{run.name}: there is nothing to pull from a target of kind {run.kind}: it is in {where}")
    desk.runner.perform(target.pull(run, str(into)))


def suspend(desk: Desk, run: Run, *, again: bool) -> None:
    """Let a run rest, or go on (``again``). Raises ConfigError where its target cannot."""
    target = target_of(run)
    if not isinstance(target, targets.Suspending):
        raise ConfigError(f"{run.name}: a target of kind {run.kind} cannot suspend a run: ddpctl stop {run.name}")
    desk.runner.perform(target.resume(run) if again else target.suspend(run))


def status(desk: Desk, asked: tuple[Run, ...]) -> tuple[RunStatus, ...]:
    """How these runs fare, in the same order: each target is asked once."""
    found = {
        run.name: RunStatus(run=run.name, state="unknown", message=_strange(run))
        for run in asked
        if run.kind not in targets.kinds()
    }
    groups: dict[tuple[str, str], list[Run]] = {}  # a target's options may have changed between two runs
    for run in asked:
        if run.name not in found:
            groups.setdefault((run.kind, json.dumps(run.options, sort_keys=True)), []).append(run)
    for group in map(tuple, groups.values()):
        try:
            target = target_of(group[0])
        except ConfigError as error:  # one record that makes no sense keeps nobody from the others
            found |= {run.name: RunStatus(run=run.name, state="unknown", message=str(error)) for run in group}
            continue
        for state in desk.runner.perform(target.status(group, now=time.time())):
            found[state.run] = state
    discovery.keep(desk.root, ((run, found[run.name]) for run in asked))
    return tuple(found[run.name] for run in asked)


def target_of(run: Run) -> targets.Target:
    """The target that a run was started on. Raises ConfigError for another version's."""
    if run.kind not in targets.kinds():
        raise ConfigError(f"{run.name}: {_strange(run)}")
    try:
        return targets.make(run.kind, targets.fill_options(run.kind, run.options))
    except ConfigError as error:
        raise ConfigError(f"{run.name}: {error}") from None


def _strange(run: Run) -> str:
    return f"its target is of a kind that ddpctl {__version__} does not know: {run.kind}"
