"""Launches, follows, stops and pulls runs. These functions are the steps of ddpctl's subcommands."""

import getpass
import json
import os
import signal as signals
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ddpctl import targets
from ddpctl.command import Command, Verb
from ddpctl.errors import CannotWriteError, ConfigError, DdpctlError, NoInputError, UnavailableError, UsageError
from ddpctl.execution import interrupts
from ddpctl.execution.executor import Executor
from ddpctl.execution.node_probe import Probe, ProbeResult
from ddpctl.job.launch_plan import TRAINER, Plan, Request, program, title
from ddpctl.operations import lost_replies, run_folders
from ddpctl.operations.replacement import replacing_lost_nodes
from ddpctl.runs import run_store
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Launch, Run
from ddpctl.targets import LogQuery, StopSignal
from ddpctl.text import one_line, plain
from ddpwire import locks
from ddpwire.exits import STOPPED, Exit
from ddpwire.run_files import (
    CHECKPOINTS,
    NODE_LOG,
    TARGETS,
    MetricsTarget,
    is_targets_file_of,
    targets_file_name,
    targets_text,
    write_atomic,
)
from ddpwire.version import __version__

SETTLE_S = 10.0  # how long a run may appear to be alive after its last log line
LAUNCH_STOP_S = 150.0  # how long an interrupted launch may take to undo its changes
STOP_MARGIN_S = 5.0  # how long a run may take to end after its ranks' grace period
SILENT_S = 1.0  # how long to wait for the outcome of a run without living nodes
PROGRESS_S = 5.0
POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class AppContext:
    """The objects that every subcommand uses."""

    executor: Executor
    root: Path  # the folder of the runs
    emit: Callable[[str], None]  # prints a line for the user


def open_context(environ: Mapping[str, str] = os.environ) -> AppContext:
    """Return the context of this process. Its ``emit`` prints to stderr."""
    return AppContext(
        executor=Executor(environ),
        root=run_store.state_dir(environ),
        emit=lambda line: print(plain(line), file=sys.stderr),
    )


# Find the run that a subcommand is about


def find(context: AppContext, name: str | None, *, task: int | None = None) -> Run:
    """Return a run by its name, or by its folder if ``name`` has a slash. ``task`` selects a task of an array."""
    run = run_folders.load(Path(name).absolute()) if name and "/" in name else run_store.load(context.root, name)
    if task is None:
        return run
    tasks = {each.name.rpartition("-")[2]: each for each in target_of(run).tasks(run)}
    if str(task) not in tasks:
        known = f"has tasks {', '.join(tasks)}" if tasks else "is not an array"
        raise NoInputError(f"--task {task}: run '{run.name}' {known}")
    return tasks[str(task)]


# Plan, submit, follow, stop


def plan_of(request: Request, run: str, folder: Path, *, uid: str = "") -> Plan:
    """Return the plan of a run. ``uid`` is the run's unique ID. It is empty if only a spec is rendered."""
    old, job, user = _resumed_run(request), request.job, ""
    if job.checkpoint_dir and program(job.command)[:2] != TRAINER:
        raise ConfigError(
            "job.checkpoint_dir: only ddptrain copies checkpoints to an object store, but the job runs another program"
        )
    if job.checkpoint_dir and uid:  # the folder in the object store
        own = f"{job.checkpoint_dir.rstrip('/')}/{run}"
        job = replace(job, checkpoint_dir=(old and old.job.checkpoint_dir) or own)
    if uid:
        with suppress(OSError, KeyError, ImportError):
            user = getpass.getuser()
    return Plan(
        name=run,
        job=job,
        cwd=request.cwd,
        folder=str(folder),
        checkpoint_dir=old.checkpoint_dir if old else str(folder / CHECKPOINTS),
        uid=uid,
        user=user,
        resumes=old.name if old and old.elsewhere and not job.checkpoint_dir else "",
        wait_s=request.wait_s,
    )


def _resumed_run(request: Request) -> Run | None:
    """Return the run to resume. Return None if the request resumes no run, or a run that never started."""
    return request.resumes if request.resumes and request.resumes.handle else None


def check_alone(context: AppContext, old: Run) -> None:
    """Check that no other active run uses the checkpoints of ``old``. Raises UsageError or UnavailableError.

    Only warn if the nodes that answer have ended, and those that do not answer may train without them.
    """
    sharing = tuple(run for run in run_store.load_all(context.root) if run.checkpoint_dir == old.checkpoint_dir)
    for state in status(context, sharing):
        if state.state == "unknown" and state.run == old.name:
            if not any(report.outcome for report in state.nodes):
                raise UnavailableError(f"--resume: it is unknown whether run '{old.name}' has ended: {state.message}")
            context.emit(f"  warning: run '{old.name}' may still train, beside the new run: {state.message}")
        if not state.ended and state.state != "unknown":
            raise UsageError(
                f"--resume: run '{state.run}' has not ended, and two trainings cannot share checkpoints: stop that run"
            )


def dry_run(context: AppContext, request: Request) -> None:
    """Print the commands that a launch would run."""
    name, _ = run_store.choose_name(context.root, request)
    run_store.check_free(context.root, name)
    plan = plan_of(request, name, context.root / name, uid="<uid>")
    target = targets.make(request.kind, request.options)
    submission = context.executor.dry_run(target.dry_run(plan), sys.stdout)
    for line in filter(None, (*submission.table, *submission.note.splitlines())):
        context.emit(f"# {line}")


def start(context: AppContext, request: Request, *, attached: bool) -> Run:
    """Start a run and save its record. If the launch fails or is interrupted, undo it as far as possible."""
    options = context.executor.perform(targets.make(request.kind, request.options).resolve())
    target = targets.make(request.kind, options)
    name, base_name = run_store.choose_name(context.root, request)
    folder = run_store.create(context.root, name, resumes=_resumed_run(request) is not None)
    plan = plan_of(request, name, folder, uid=uuid.uuid4().hex[:12])
    run = Run(
        **vars(plan),
        created=time.time(),
        target=request.target,
        kind=request.kind,
        options=asdict(options),
        version=__version__,
        base_name=base_name,
    )
    where = request.kind if request.target == request.kind else f"{request.target}, {request.kind}"
    with run_store.launching(folder) as context.executor.on_say:
        context.executor.may_have_started = False
        try:
            run_store.save(run)
            submission = context.executor.perform(target.submit(plan, attached=attached))
        except BaseException as error:
            submission = lost_replies.settle(context.executor, target, run, error, emit=context.emit)
        try:
            checkpoint_dir = submission.checkpoint_dir or run.checkpoint_dir
            job = replace(run.job, nodes=submission.nodes or run.job.nodes)
            run = replace(run, handle=submission.handle, checkpoint_dir=checkpoint_dir, job=job)
            run_store.save(run)
            context.emit(f"run '{name}': {title(job)} on {where} ({request.target_source})")
            for line in filter(None, (*submission.table, *submission.note.splitlines())):
                context.emit(f"  {line}")
            old = request.resumes
            if old and not old.handle:
                context.emit(f"  run '{old.name}' did not start, so the new run has no checkpoints to resume from")
            elif old and not run_store.has_checkpoint(old):
                problem = f"run '{old.name}' has no checkpoint in {old.checkpoint_dir}"
                context.emit(
                    f"  {problem}: the training starts at step 0, unless the script keeps checkpoints elsewhere"
                )
            context.emit(f"  logs         {run.logs_at}")
        except BaseException as error:
            lost_replies.settle(context.executor, target, run, error, emit=context.emit)  # it raises an error
    return run


def follow(context: AppContext, run: Run, *, tail: int | None = None, launched: bool = False) -> tuple[RunStatus, int]:
    """Print a run's logs until the run ends. Return its last status, and ddpctl's exit code.

    ``tail`` is how many earlier lines to print. If the log ends with the status's message, the returned status has no
    message.

    The first Ctrl-C sends SIGINT to the ranks, and the second kills them. If this process has ``launched`` the run,
    SIGTERM to this process also stops the run. SIGHUP does the same if the target has the capability "tethered". In all
    other cases, SIGTERM and SIGHUP raise ``interrupts.Terminated``, and the run continues.
    """
    target = target_of(run)
    ends_on = (signals.SIGTERM, signals.SIGHUP) if "tethered" in target.capabilities else (signals.SIGTERM,)
    stopper = Stopper(context, run, first="INT", ends_on=ends_on if launched else ())
    query = LogQuery(follow=True, tail=tail)
    if "stop" not in target.capabilities:
        try:
            context.executor.perform(target.logs(run, query))
        except KeyboardInterrupt as error:
            state = RunStatus(run=run.name, state="running", message=target.exit_message(run))
            return state, interrupts.code_of(error)
        return _ended(context, stopper)
    with replacing_lost_nodes(context.executor, target, stopper, emit=context.emit):
        printed = False
        while True:
            try:
                with suppress(CannotWriteError):  # if stdout cannot be written to, the run continues
                    if not printed:  # an interrupt after the end of the log does not print it again
                        context.executor.perform(target.logs(stopper.run, query), on_interrupt=stopper)
                    printed = True
                state, code = _ended(context, stopper)
                if printed and state.outcome and state.message == state.outcome.message:
                    state = replace(state, message="")  # the log ends with it
                return state, code
            except KeyboardInterrupt as error:  # between two commands
                if not stopper.handles(error):
                    context.emit(f"run '{run.name}' keeps running; ddpctl attach {run.name} follows it")
                    raise
                stopper(error)


def _ended(context: AppContext, stopper: "Stopper") -> tuple[RunStatus, int]:
    """Wait until the run has ended. Return its last status, and ddpctl's exit code."""
    run = stopper.run
    if (state := status(context, (run,))[0]).alive:
        time.sleep(SILENT_S)
        state = status(context, (run,))[0]
    else:
        state = _wait_until_ended(context, run, SETTLE_S)
    if state.alive:
        context.emit(f"the log can no longer be printed; run '{run.name}' keeps running, and Ctrl-C stops it")
    while state.alive:
        try:
            time.sleep(POLL_S)
            state = status(context, (run,))[0]
        except KeyboardInterrupt as error:
            stopper(error)
    if state.state == "unknown":
        context.emit(f"run '{run.name}' no longer answers; it may still be running: try ddpctl attach {run.name}")
        return state, Exit.UNAVAILABLE
    if stopper.times:
        return state, stopper.code
    return state, Exit.KILLED if state.code is None else state.code


class Stopper:
    """Handles Ctrl-C for an attached run. The first Ctrl-C makes the run save and stop, and the second kills it.

    ``first`` is the signal that the first Ctrl-C sends. A target that cannot send INT sends TERM instead. The run also
    stops if ddpctl receives one of the signals ``ends_on``.
    """

    def __init__(
        self, context: AppContext, run: Run, *, first: StopSignal, ends_on: Collection[signals.Signals] = ()
    ) -> None:
        self._context, self.run, self._first, self._ends_on = context, run, first, ends_on
        self.times = 0
        self.code = int(Exit.INTERRUPTED)

    def handles(self, error: KeyboardInterrupt) -> bool:
        """Return whether the signal that raised ``error`` stops the run."""
        return not isinstance(error, interrupts.Terminated) or error.number in self._ends_on

    def __call__(self, error: KeyboardInterrupt | None = None) -> None:
        """Stop the run, or kill it at the second call. Raise ``error`` again if its signal does not stop the run."""
        signal, by, again, only = self._first, "you (Ctrl-C)", "Ctrl-C again kills them", ""
        if isinstance(error, interrupts.Terminated):
            if not self.handles(error):
                raise error
            self.code, name = interrupts.code_of(error), signals.Signals(error.number).name
            signal, by, again = "TERM", f"{name} to ddpctl", f"a second {name} kills them"
        self.times += 1
        run_store.note_stop(self.run, by)
        run, target = self.run, target_of(self.run)
        if self.times > 1:
            signal = "KILL"
            self._context.emit(f"killing run '{run.name}'")
        else:
            if signal == "INT" and "interrupt" not in target.capabilities:
                signal, only = "TERM", f" with SIGTERM, because {run.kind} cannot send SIGINT"
            self._context.emit(
                f"stopping run '{run.name}'{only}: ranks that are running have {run.job.grace:g} s to save; {again}"
            )
        try:
            self._context.executor.perform(target.stop(run, signal=signal, wait=self.times > 1))
        except UnavailableError as error:  # some machines do not answer; the run may continue on others
            self._context.emit(str(error))


def stop(context: AppContext, run: Run, *, kill: bool, before: RunStatus | None = None) -> RunStatus:
    """Make a run save and stop. Kill the run if ``kill``, or if it is still alive after its grace period.

    ``before`` is the status of the run, if it is known.
    Raises DdpctlError if it is still alive after the kill.
    """
    if (launch := run_store.unfinished_launch(run)) and launch.going and (end := _stop_launch(run, launch)):
        return end
    target = target_of(run)
    run_store.note_stop(run, "you (ddpctl stop)")
    try:
        run = lost_replies.with_handle(context.executor, target, run)
    except UnavailableError:
        context.executor.perform(target.stop(run, signal="KILL"))  # what can be found
        raise
    if not kill:
        if before and before.state in ("pending", "suspended"):
            when = " before its job starts" if before.state == "pending" else ", which has no ranks now"
            context.emit(f"canceling run '{run.name}'{when}: {one_line(before.message)}")
        else:
            context.emit(
                f"stopping run '{run.name}': ranks that are running have {run.job.grace:g} s to save; "
                f"ddpctl stop --kill {run.name} ends them at once"
            )
        context.executor.perform(target.stop(run, signal="TERM", wait=False))
        state = _wait_until_ended(context, run, run.job.stop_s + STOP_MARGIN_S)
        if state.ended:
            return state
        if state.state == "unknown" and not state.alive:  # its ranks may be saving
            raise UnavailableError(f"it is unknown whether run '{run.name}' has stopped: {state.message}")
        if state.alive:
            context.emit(f"run '{run.name}' did not stop within its grace period: killing it")
    if not context.executor.perform(target.stop(run, signal="KILL")):
        raise DdpctlError(f"run '{run.name}' is still alive after it was killed: see ddpctl status {run.name}")
    return _wait_until_ended(context, run, SETTLE_S)


def _stop_launch(run: Run, launch: Launch) -> RunStatus | None:
    """Tell the ddpctl process that is launching a run to undo the launch. Wait until the process has done so.

    Return None if the launch had already finished. Raises UnavailableError if that process is on another machine, or
    does not end.
    """
    if launch.host != os.uname().nodename:
        raise UnavailableError(
            f"run '{run.name}' is being launched by {launch}", hint="stop the run on that machine, or wait"
        )
    with suppress(ProcessLookupError):
        os.kill(launch.pid, signals.SIGTERM)
    deadline = time.monotonic() + LAUNCH_STOP_S
    while (unfinished := run_store.unfinished_launch(run)) and unfinished.going:
        if time.monotonic() > deadline:
            raise UnavailableError(f"the launch of run '{run.name}' by {launch} has not ended in {LAUNCH_STOP_S:g} s")
        time.sleep(POLL_S)
    if Path(run.folder).exists():
        return None
    return RunStatus(run=run.name, state="stopped", message="its launch was undone", code=Exit.SAVED_TERM)


def clear(run: Run) -> Verb[None]:
    """Remove the jobs, pods and processes that an ended run has left on its machines."""
    if not (yield from target_of(run).stop(run, signal="KILL")):
        raise DdpctlError(f"run '{run.name}' was not removed completely: see ddpctl status {run.name}")


def _wait_until_ended(context: AppContext, run: Run, limit_s: float) -> RunStatus:
    started = reported_at = time.monotonic()
    while not (state := status(context, (run,))[0]).ended and (now := time.monotonic()) < started + limit_s:
        if not state.alive and state.state != "stopping" and now - started > SILENT_S:
            break
        if now - reported_at >= PROGRESS_S:
            reported_at = now
            context.emit(f"  waiting for run '{run.name}': {now - started:.0f} of {limit_s:g} s, {state.message}")
        time.sleep(POLL_S)
    return state


def probe(context: AppContext, run: Run, request: Probe) -> tuple[ProbeResult, ...]:
    """Return the requested data of each node. Return an empty tuple if the run has no machines yet."""
    return () if is_unplaced(run) else context.executor.perform(target_of(run).probe(run, request))


def is_unplaced(run: Run) -> bool:
    """Return whether the run's launch is unfinished and its target has not returned a handle yet."""
    return not run.handle and run_store.unfinished_launch(run) is not None


def execute(context: AppContext, run: Run, *, node: int, argv: tuple[str, ...], tty: bool) -> int:
    """Run a command on the machine or in the container of a node. Raises NoInputError if there is no such node."""
    if not 0 <= node < run.job.max_machines:
        raise NoInputError(f"--node {node}: the nodes of run '{run.name}' are 0 to {run.job.max_machines - 1}")
    return context.executor.perform(target_of(run).execute(run, node=node, argv=argv, tty=tty))


def pull(context: AppContext, run: Run, into: Path | None = None, *, best: bool = False) -> Path:
    """Fetch a run's files into a local folder, and return the folder.

    Raises ConfigError if the files are already accessible, and NoInputError if there are no files yet. Raises
    UnavailableError if a machine of the run does not answer, or if another pull of the run is in progress.
    """
    if "pull" in targets.capabilities(run.kind) and is_unplaced(run):
        (state,) = status(context, (run,))
        raise NoInputError(f"run '{run.name}' has written nothing{'' if state.ended else ' yet'}: {state.message}")
    folder = Path(os.path.abspath(into or Path(run.folder, run_store.PULLED)))  # noqa: PTH100 - it removes "..", too
    verb = _pull(run, folder, best=best)
    with Path(run.folder, "pull.lock").open("w") as lock:
        if locks.lock(lock.fileno(), Path(lock.name)) is locks.Lock.BUSY:
            raise UnavailableError(f"another ddpctl pull of run '{run.name}' is running", hint="wait for it")
        missing = context.executor.perform(verb)
    if missing:
        raise UnavailableError("\n".join([f"some files could not be fetched into {folder}", *missing]))
    return folder


def _pull(run: Run, folder: Path, *, best: bool) -> Verb[tuple[str, ...]]:
    """Fetch the checkpoints from the run's object store, if it has one, and the other files from its machines."""
    for task in (target_of(run).tasks(run) or (run,)) if run.job.checkpoint_dir else ():
        into = folder / task.name.removeprefix(run.name).lstrip(".") / CHECKPOINTS
        argv = (sys.executable, "-P", "-m", "ddprank.object_store", str(task.job.checkpoint_dir), str(into))
        (done,) = yield (Command(argv=(*argv, "--best") if best else argv, mode="stream", timeout_s=None),)
        if done.returncode:
            failure = ConfigError if done.returncode == Exit.CONFIG else UnavailableError
            raise failure(f"{task.job.checkpoint_dir} was not fetched: see the line above")
    if run.job.checkpoint_dir and not ("pull" in targets.capabilities(run.kind) and run.elsewhere):
        return ()
    return (yield from target_of(run).pull(run, str(folder), best=best))


def status(context: AppContext, runs: tuple[Run, ...]) -> tuple[RunStatus, ...]:
    """Return the status of each run, in the same order."""
    states: dict[str, RunStatus] = {}
    # A target's options may have changed between two runs.
    groups: dict[tuple[str, str], tuple[targets.Target, list[Run]]] = {}
    for run in runs:
        try:
            key = run.kind, json.dumps(run.options, sort_keys=True)
            target = target_of(run)
            groups.setdefault(key, (target, []))[1].append(lost_replies.with_handle(context.executor, target, run))
        except DdpctlError as error:  # one invalid record must not hide the other runs
            states[run.name] = _with_local_facts(run, RunStatus(run=run.name, state="unknown", message=str(error)))
    for target, group in groups.values():
        try:
            answers = context.executor.perform(target.status(tuple(group), now=time.time()))
        except DdpctlError as error:  # one target's error must not hide the other runs
            answers = tuple(RunStatus(run=run.name, state="unknown", message=str(error)) for run in group)
        for run, state in zip(group, answers, strict=True):
            states[run.name] = _with_local_facts(run, run_folders.without_guess(run, state))
    update_discovery(context.root, [(run, states[run.name]) for run in runs if Path(run.folder).parent == context.root])
    return tuple(states[run.name] for run in runs)


def _with_local_facts(run: Run, state: RunStatus) -> RunStatus:
    """Add data from the run's local folder to its status: how it ended, who stopped it, and an unfinished launch."""
    # The target did not answer, or knows nothing about the run's end.
    is_unsure = state.state == "unknown" or state.is_absent or (state.ended and state.outcome is None)
    if is_unsure and (end := run_store.known_end(run)):
        exists = {name: getattr(state, name) for name in ("remains", "has_logs", "has_files")}
        state = replace(end, nodes=state.nodes or end.nodes, **exists)  # what is newer: what still exists
    if state.ended and state.state != "lost" and run.handle and not run_folders.is_by_hand(run):
        run_store.note_end(run, state)
    launch = run_store.unfinished_launch(run)
    if state.ended and any(Path(run.folder).glob(f"node-*/{NODE_LOG}")):  # saved before the nodes were deleted
        state = replace(state, has_logs=True)
    by, outcome = run_store.stopped_by(run), state.outcome
    gone = state.is_absent or state.state in ("stopped", "lost")
    if by and gone and (outcome is None or outcome.cause == "stopped"):
        at = outcome if outcome and outcome.rank is not None and outcome.code not in STOPPED else None
        who = f": rank {at.rank} on node {at.node} ended with exit code {at.code}" if at else ""
        code = int(Exit.SAVED_TERM) if state.code is None else state.code
        stopped = replace(state, state="stopped", code=code, message=f"stopped by {by}{who}")
        if run.handle:
            run_store.note_end(run, stopped)
        return stopped
    if launch is None or state.outcome or not (state.ended or state.state in ("starting", "unknown")):
        return state
    if launch.going:
        doing = one_line(launch.doing) or "ddpctl launch is starting it"
        return replace(state, state="starting", code=None, message=f"{doing} ({launch})")
    if state.alive or state.state == "unknown":
        return replace(state, message=f"{state.message}; the launch was interrupted ({launch})")
    message = f"the launch was interrupted before the run started ({launch} has ended)"
    return replace(state, state="lost", code=int(Exit.KILLED), message=message, remains=True)


def target_of(run: Run) -> targets.Target:
    """Return the target of a run. Raises ConfigError if this version does not know the kind of the target."""
    try:
        if run.kind not in targets.kinds():
            raise ConfigError(f"its target is of a kind that ddpctl {__version__} does not know: {run.kind}")
        return targets.make(run.kind, targets.fill_options(targets.options_type(run.kind), run.options))
    except ConfigError as error:
        raise ConfigError(f"run '{run.name}': {error}") from None


# Discovery for Prometheus: file_sd files in the folder ``.targets``. Nodes on this machine and Slurm's batch script
# write their own files. For other nodes, one file per run is written here when the run's status is requested. The files
# of a run that has ended are removed. A Kubernetes cluster has its own discovery.


def update_discovery(root: Path, runs: Iterable[tuple[Run, RunStatus]]) -> None:
    """Update the files of Prometheus' service discovery. A file that cannot be written is skipped."""
    folder = root / TARGETS
    present = tuple(folder.iterdir()) if folder.is_dir() else ()
    for run, status in runs:
        with suppress(OSError):
            if status.ended:
                for path in present:
                    if is_targets_file_of(path.name, run.name):
                        path.unlink(missing_ok=True)
            elif run.elsewhere and status.nodes and "discovery" in targets.capabilities(run.kind):
                endpoints = [
                    MetricsTarget(url=report.state.metrics, job_id=run.name, node=report.node, launcher=run.kind)
                    for report in status.nodes
                    if report.alive and report.state and report.state.metrics
                ]
                path, content = folder / targets_file_name(run.name), targets_text(endpoints)
                if endpoints and not (path.exists() and path.read_text() == content):
                    folder.mkdir(parents=True, exist_ok=True)
                    write_atomic(path, content.encode())
                    path.chmod(0o644)  # Prometheus runs as another user
