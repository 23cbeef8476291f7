"""Launches a run on the target local for a notebook, follows the run, and returns its result or raises its error.

``ddpctl.operations.launcher`` starts and stops the run. This module adds only what a notebook needs.
"""

import json
import os
import pickle
import re
import shutil
import tempfile
import time
from codecs import getincrementaldecoder
from collections import ChainMap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from ddpctl.errors import CannotWriteError, ConfigError, UsageError
from ddpctl.execution.executor import Executor
from ddpctl.job.launch_plan import Request, program
from ddpctl.job.schema import validate
from ddpctl.job.spec import NAME_PATTERN, JobSpec
from ddpctl.notebook import RankError, serialization
from ddpctl.notebook.progress import Progress, cell_display
from ddpctl.notebook.rank_main import FAILURE, RESULT
from ddpctl.operations import launcher
from ddpctl.operations.launcher import AppContext
from ddpctl.runs import run_store
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpctl.targets.local import LocalOptions
from ddpwire import kaggle
from ddpwire.exits import Exit
from ddpwire.merged_output import LogTail, MergedOutput
from ddpwire.run_files import CHECKPOINTS, NODE_LOG, OUTCOME, RECORD, node_name, rank_log

LAST_LINES = 25
CALL_FILE = "call.pkl"
OUTCOME_LINE = "ddpctl outcome "  # start of the log line with the session's outcome, which the target kaggle reads
POLL_S = 0.1
FUNCTION, SOURCE = "function", "source"  # keys in the handle of a run whose program is a function

# The first and the largest time between two checks that the run is alive. The time grows, because each check starts a
# Python process, and a session may last 12 hours.
ALIVE_CHECK_S, ALIVE_CHECK_SELDOM_S = 2.0, 15.0
MAX_DEPTH = 5


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run of a script. The run has succeeded, or has saved and stopped at its deadline."""

    run: str
    folder: Path
    checkpoint_dir: Path
    code: int  # 0, or 143 if the run was stopped and can be resumed


def run(
    callee: Callable[..., Any] | str,
    *,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    name: str | None,
    resume: str | bool,
    **fields: Any,
) -> Any:
    """Do what ``ddpctl.notebook.launch`` documents. ``fields``: those arguments that are fields of JobSpec."""
    # In messages, show the name of the function instead of the module that calls it.
    module = "ddpctl.notebook.rank_main"
    shown = callee if isinstance(callee, str) else f"{serialization.name_of(callee)}()"
    context = AppContext(
        executor=_executor(),
        root=run_store.state_dir(os.environ),
        emit=lambda line: print(line.replace(module, shown), flush=True),
    )
    job = _job(callee, args, kwargs, fields)
    if name is not None and not NAME_PATTERN.fullmatch(name):
        raise UsageError(f"launch: name is {name!r}: expected up to 40 of a-z, 0-9 and '-', starting with a letter")
    packed = None if isinstance(callee, str) else serialization.pack(callee, args, kwargs)
    resumes = _resumed(context, resume, program_of(callee))
    calls = None  # the folder of the serialized call and its result; no other user can read it
    if packed is not None:
        (context.root / ".calls").mkdir(parents=True, exist_ok=True)
        calls = Path(tempfile.mkdtemp(dir=context.root / ".calls"))
        (calls / CALL_FILE).write_bytes(packed)
        job = replace(job, command=("-m", module, str(calls / CALL_FILE)))
    request = Request(
        job=job,
        target="local",
        kind="local",
        options=LocalOptions(),
        target_source="from a notebook",
        cwd=str(Path.cwd()),
        name=name,
        resumes=resumes,
    )
    try:
        record = _start(context, request)
        if not isinstance(callee, str):
            # ps and status print this command, and resume=True finds the run by the program in its handle.
            function, source = program_of(callee)
            handle = {**record.handle, FUNCTION: function, SOURCE: source}
            record = replace(record, job=replace(job, command=(serialization.name_of(callee),)), handle=handle)
            run_store.save(record)
        state, interrupted = follow(context, record)
        _print_end(context, record, state)
        if interrupted:
            raise KeyboardInterrupt
        _judge(record, state, calls)
        if calls is None:
            folder, checkpoint_dir = Path(record.folder), Path(record.checkpoint_dir)
            return Finished(run=record.name, folder=folder, checkpoint_dir=checkpoint_dir, code=state.code or 0)
        if state.code or not (calls / RESULT).exists():
            return None
        return pickle.loads((calls / RESULT).read_bytes())  # noqa: S301 (rank 0 wrote it)
    finally:
        context.executor.reap()
        if calls is not None:
            shutil.rmtree(calls, ignore_errors=True)
            with suppress(OSError):  # the parent has the folders of other calls
                calls.parent.rmdir()


@cache
def _executor() -> Executor:
    """Return the executor for all calls of this kernel. If the kernel ends, the ranks end, too.

    The ranks get the kernel's environment at the time of the call. Only the matplotlib backend is replaced, because the
    notebook's backend draws into a cell. The commands do not read the kernel's stdin, because it is not the input of
    the cell.
    """
    return Executor(ChainMap({"MPLBACKEND": "agg"}, os.environ), has_stdin=False)


def _job(
    callee: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any], fields: Mapping[str, Any]
) -> JobSpec:
    command: tuple[str, ...] = ()
    if isinstance(callee, str):
        if kwargs:
            raise UsageError(f"launch: kwargs are only for a function: give the command line of {callee} in args")
        command = (callee, *map(str, args))
    elif not callable(callee):
        raise UsageError(f"launch: {type(callee).__name__} is neither a function nor the name of a script")
    on = kaggle.session(os.environ)
    device = fields["device"] or os.environ.get("DDPCTL_DEVICE") or ("cuda" if on and on.batch else "auto")
    values, problems = validate(JobSpec, {**fields, "command": command, "device": device})
    if problems:
        raise UsageError(f"launch: {problems[0].field}: {problems[0].text}")
    called = Path(callee).stem if isinstance(callee, str) else serialization.name_of(callee)
    name = re.sub(r"[^a-z0-9]+", "-", called.lower()).strip("-")
    job = JobSpec(**{**values, "name": name if NAME_PATTERN.fullmatch(name) else "train"})
    for _, text in job.problems():
        raise UsageError(f"launch: {text}")
    return job


def _start(context: AppContext, request: Request) -> Run:
    try:
        return launcher.start(context, request, attached=True)
    except ConfigError as error:
        if kaggle.session(os.environ) and "gpus_needed" in error.fields:
            error.hint += "; on Kaggle: Settings > Accelerator > GPU T4 x2, which needs a verified phone number "
            error.hint += "and is 30 hours a week"
        raise


def _resumed(context: AppContext, resume: str | bool, own: "Program") -> Run | None:
    if not resume:
        return None
    if resume is True:
        earlier = _newest(context, own)
    else:
        earlier = run_store.load(context.root, str(resume))
        if earlier.elsewhere:
            raise UsageError(
                f"launch: resume={resume!r}: the run's checkpoints are in {earlier.checkpoint_dir}, not here"
            )
    if earlier:
        launcher.check_alone(context, earlier)
        note = (
            "" if run_store.has_checkpoint(earlier) else ", which left no checkpoint: the run starts from the beginning"
        )
        context.emit(f"continuing from run '{earlier.name}'{note}")
    return earlier


def _newest(context: AppContext, wanted: "Program") -> Run | None:
    if "<lambda>" in wanted.name:
        raise UsageError("launch: resume=True needs a function with a name, but this is a lambda: use resume='RUN'")
    here = [run for run in run_store.load_all(context.root) if run.kind == "local"]
    on = kaggle.session(os.environ)
    inputs = _runs_below(on.input) if on else []
    own = [run for run in here if program_of_run(run) == wanted]
    # An earlier session had its program in another folder, so only the names are compared.
    own += [run for run in inputs if program_of_run(run).name == wanted.name]
    if newest := max(own, key=lambda run: run.created, default=None):
        return newest if newest in here else restore(newest, context.root)
    context.emit(f"no earlier run of {wanted.name} in {wanted.source}: the run starts from the beginning")
    if other := next((run for run in here + inputs if program_of_run(run).name == wanted.name), None):
        context.emit(f"  to continue from the run of {program_of_run(other).source}, use resume={other.name!r}")
    return None


def _print_end(context: AppContext, record: Run, state: RunStatus) -> None:
    outcome = state.outcome
    context.emit(
        f"run '{record.name}' {state.state}{f', exit code {state.code}' if state.code else ''}: {state.message}"
    )
    if state.code:
        context.emit(f"  logs         {record.logs_at}")
    if run_store.has_checkpoint(record):
        context.emit(f"  checkpoints  {record.checkpoint_dir}")
    if outcome and outcome.cause == "stopped" and outcome.code != Exit.INTERRUPTED:
        context.emit("  resume with  launch(..., resume=True); on Kaggle, first add this version's output as an input")
    on = kaggle.session(os.environ)
    if on and on.batch and outcome:  # the ddpctl that submitted this notebook reads this line
        end = {"code": outcome.code, "cause": outcome.cause, "message": outcome.message}
        context.emit(OUTCOME_LINE + json.dumps(end))


def _judge(record: Run, state: RunStatus, calls: Path | None) -> None:
    """Raise RankError if the run failed. A run that saved and stopped after a SIGTERM has not failed."""
    outcome = state.outcome
    if not state.code or (outcome and outcome.cause == "stopped" and outcome.code == Exit.SAVED_TERM):
        return
    rank, message, original = outcome.rank if outcome else None, state.message, b""
    place: dict[str, Any] = {}
    if outcome and rank is not None:
        log = Path(record.folder) / node_name(outcome.node or 0) / rank_log(rank)
        if calls and (path := calls / FAILURE.format(rank=rank)).exists():
            failure = pickle.loads(path.read_bytes())  # noqa: S301 (our own rank wrote it)
            place = {name: failure[name] for name in ("cell", "line", "traceback")}
            message = f"rank {rank} failed in {place['cell']}, line {place['line']}: {failure['message']}"
            original = failure["original"]
        elif log.exists():
            place["traceback"] = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
    error = RankError(message, rank=rank, code=int(state.code), **place)
    with suppress(Exception):  # it could not be pickled, or its __init__ needs other arguments
        error.__cause__ = pickle.loads(original)  # noqa: S301
    raise error


# Show the log and the progress of the run in the cell until the run ends. The log is read from the file of the node,
# because the cell does not show the stdout of other processes.


class Tail(LogTail):
    """Prints new text of a file at once. It also prints incomplete lines, such as a progress bar."""

    def __init__(self, path: Path) -> None:
        decode = getincrementaldecoder("utf-8")("replace").decode
        self._output = MergedOutput(lambda data: print(decode(data), end="", flush=True))
        super().__init__(path, self._output.add_source())

    def end_line(self) -> None:
        """End an incomplete line, so that other output starts on a new line."""
        self._source.close()
        self._source = self._output.add_source()


def follow(context: AppContext, run: Run) -> tuple[RunStatus, bool]:
    """Show the run until its end. Return its final status, and whether the cell was interrupted."""
    node = Path(run.folder) / node_name(0)
    tail, stopper = Tail(node / NODE_LOG), launcher.Stopper(context, run, first="TERM")
    progress = Progress(node, cell_display())
    checked, interval_s = time.monotonic(), ALIVE_CHECK_S
    state = None
    while state is None:
        try:
            tail.pass_on()
            progress.update()
            if (node / OUTCOME).exists() or time.monotonic() - checked > interval_s:
                checked, interval_s = time.monotonic(), min(2 * interval_s, ALIVE_CHECK_SELDOM_S)
                (status,) = launcher.status(context, (run,))
                state = status if status.ended else None
            if state is None:
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            tail.end_line()
            while True:
                try:
                    stopper()
                    break
                except KeyboardInterrupt:  # the cell was interrupted again: kill the run
                    continue
    tail.pass_on()
    tail.close()
    progress.update(last=True)
    return state, bool(stopper.times)


# The program of a run. resume=True continues from the newest run of the same program. A function with the same name in
# another notebook is another program.


class Program(NamedTuple):
    """A function, script or module, and the file or folder that contains it."""

    name: str
    source: str


def program_of(callee: Callable[..., Any] | str) -> Program:
    """Return the program for the first argument of ``launch``."""
    if isinstance(callee, str):
        return _program_of_command((callee,), str(Path.cwd()))
    return Program(serialization.full_name(callee), serialization.source_of(callee))


def program_of_run(run: Run) -> Program:
    """Return the program of an earlier run."""
    if FUNCTION in run.handle:
        return Program(str(run.handle[FUNCTION]), str(run.handle.get(SOURCE)))
    return _program_of_command(run.job.command, run.cwd)


def _program_of_command(command: tuple[str, ...], cwd: str) -> Program:
    args = program(command)
    if args[0] == "-m":
        return Program(args[1], os.path.realpath(cwd))
    path = Path(os.path.realpath(Path(cwd) / args[0]))
    return Program(path.name, str(path.parent))


# On Kaggle, the output of an earlier notebook version can be an input of the session. Inputs are read-only, so a run in
# an input is copied to the folder of all runs before it is resumed.


def restore(run: Run, root: Path) -> Run:
    """Copy a run into ``root``, the folder of all runs, and return the copy. Raises CannotWriteError."""
    first = PurePath(run.checkpoint_dir).parent.name  # the folder of this run or, if it was resumed, of its first run
    folder = Path(run.folder)
    try:
        for name in dict.fromkeys((first, run.name)):
            source, target = folder.parent / name, root / name
            target.mkdir(parents=True, exist_ok=True)
            if (source / RECORD).exists():
                shutil.copyfile(source / RECORD, target / RECORD)
            if (source / CHECKPOINTS).exists():
                options: dict[str, Any] = {"dirs_exist_ok": True, "copy_function": shutil.copyfile}
                shutil.copytree(source / CHECKPOINTS, target / CHECKPOINTS, **options)
    except OSError as error:
        raise CannotWriteError(f"cannot copy {folder} to {root}: {error.strerror or error}") from None
    copy = replace(run, folder=str(root / run.name), checkpoint_dir=str(root / first / CHECKPOINTS))
    run_store.save(copy)
    return copy


def _runs_below(top: Path) -> list[Run]:
    """Return the runs in folders at most ``MAX_DEPTH`` levels below ``top``."""
    runs = []
    for folder, below, files in os.walk(top, followlinks=True):
        is_deepest = len(Path(folder).relative_to(top).parts) == MAX_DEPTH
        below[:] = [] if is_deepest else [name for name in below if not name.startswith(".")]
        if RECORD in files and (run := run_store.read(Path(folder))):
            runs.append(run)
    return runs
