"""One call of ``launch``: from what was asked for to a run of the target local, from its end to a value or an error.

The order of things is ``ddpctl.launch``'s; here stands only what a notebook needs besides.
"""

import json
import os
import pickle
import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ddpctl import launch as verbs
from ddpctl import runs
from ddpctl.desk import Desk, Request
from ddpctl.errors import ConfigError, UsageError
from ddpctl.notebook import parcel, previous
from ddpctl.notebook.failure import RankError
from ddpctl.notebook.follow import follow
from ddpctl.notebook.rank import FAILURE, RESULT
from ddpctl.run import Run, RunStatus
from ddpctl.runner import Runner
from ddpctl.spec import NAME_PATTERN, JobSpec, check_env, check_time
from ddpctl.targets.local import LocalOptions
from ddpwire import kaggle
from ddpwire.exits import Exit
from ddpwire.folder import node_name, rank_log

LAST_LINES = 25
PARCEL = "call.pkl"
OUTCOME = "ddpctl outcome "  # begins the line by which the target kaggle reads a session's end in its log


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a call of ``launch`` asks for; its words are told there."""

    gpus: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: str | None
    env: Mapping[str, str]
    name: str | None
    resume: str | bool
    max_restarts: int | None
    time_limit: str | None
    grace: float


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A script's run that has ended well, or was stopped by its deadline once it had saved."""

    run: str
    folder: Path
    checkpoint_dir: Path
    code: int  # 0, or 143: launch(..., resume=True) goes on from its checkpoints


def run(what: Callable[..., Any] | str, wish: Wish) -> Any:
    """Run it to its end. Raises RankError, DdpctlError and KeyboardInterrupt."""
    desk = open_desk()
    job = _job(what, wish)
    if not isinstance(what, str):  # the ranks' module means nothing to a person
        desk = replace(
            desk, say=lambda line: print(line.replace("ddpctl.notebook.rank", parcel.title(what)), flush=True)
        )
    packed = None if isinstance(what, str) else parcel.pack(what, wish.args, wish.kwargs)
    resumes = _resumed(desk, wish.resume)
    if packed is not None:
        folder = desk.root / ".calls"
        folder.mkdir(parents=True, exist_ok=True)
        job, file = _with_parcel(job, packed, folder)
    request = Request(
        job=job,
        target="local",
        kind="local",
        options=LocalOptions(),
        why="from a notebook",
        cwd=str(Path.cwd()),
        name=wish.name,
        resumes=resumes,
    )
    try:
        record = _start(desk, request)
        if not isinstance(what, str):
            record = replace(record, job=replace(job, command=(parcel.name_of(what),)))  # what ps and status call it
            runs.save(record)
        state, interrupted = follow(desk, record)
        _tell(desk, record, state)
        if interrupted:
            raise KeyboardInterrupt
        if packed is None:
            _judge(record, state)
            return Finished(
                run=record.name,
                folder=Path(record.folder),
                checkpoint_dir=Path(record.checkpoint_dir),
                code=state.code or 0,
            )
        _judge(record, state, file.parent)
        return _result(file.parent) if not state.code else None
    finally:
        desk.runner.reap()
        if packed is not None:
            previous.remove(file.parent)


def open_desk() -> Desk:
    """The desk of a call."""
    return Desk(runner=_runner(), root=runs.state_dir(os.environ), say=lambda line: print(line, flush=True))


@cache
def _runner() -> Runner:
    """One for all calls of this kernel: it holds the lifeline, so that the ranks end with the kernel.

    It sees the environment as it is at each call. A notebook's own backend of matplotlib draws into a cell, which no
    rank has.
    """
    return Runner(ChainMap({"MPLBACKEND": "agg"}, os.environ))


def _job(what: Callable[..., Any] | str, wish: Wish) -> JobSpec:
    """The wish as a job. Raises UsageError."""
    command: tuple[str, ...] = ()
    if isinstance(what, str):
        if wish.kwargs:
            raise UsageError(f"launch: kwargs are a function's; {what} takes its command line from args")
        command = (what, *(str(word) for word in wish.args))
    elif not callable(what):
        raise UsageError(f"launch: {type(what).__name__} is neither a function nor the name of a script")
    if wish.name is not None and not NAME_PATTERN.fullmatch(wish.name):
        raise UsageError(f"launch: name {wish.name!r}: lower-case letters, digits and '-', a letter first, at most 40")
    if not isinstance(wish.gpus, int) or not 1 <= wish.gpus <= 64:
        raise UsageError(f"launch: gpus is {wish.gpus!r}: a whole number from 1 to 64 is allowed")
    on = kaggle.session(os.environ)
    device = wish.device or os.environ.get("DDPCTL_DEVICE") or ("cuda" if on and on.batch else "auto")
    if device not in ("auto", "cuda", "cpu"):
        raise UsageError(f"launch: device is {device!r}: auto, cuda or cpu is allowed")
    try:
        check_env(wish.env)
        if wish.time_limit is not None:
            check_time(wish.time_limit)
    except ValueError as error:
        raise UsageError(f"launch: {error}") from None
    called = Path(what).stem if isinstance(what, str) else parcel.name_of(what)
    name = re.sub(r"[^a-z0-9]+", "-", called.lower()).strip("-")
    return JobSpec(
        name=name if NAME_PATTERN.fullmatch(name) else "train",
        gpus=wish.gpus,
        device=device,  # type: ignore[arg-type]  # one of them
        command=command,
        env=wish.env,
        max_restarts=wish.max_restarts,
        time_limit=wish.time_limit,
        grace=wish.grace,
    )


def _with_parcel(job: JobSpec, packed: bytes, folder: Path) -> tuple[JobSpec, Path]:
    """The job with the parcel as its program, and the parcel's file, in a folder of its own."""
    file = previous.fresh(folder) / PARCEL
    file.write_bytes(packed)
    return replace(job, command=("-m", "ddpctl.notebook.rank", str(file))), file


def _start(desk: Desk, request: Request) -> Run:
    try:
        return verbs.start(desk, request, attached=True)
    except ConfigError as error:
        if kaggle.session(os.environ) and "this machine has" in str(error):
            raise ConfigError(
                f"{error}; on Kaggle: Settings > Accelerator > GPU T4 x2, which needs a verified phone number and is "
                "30 hours a week"
            ) from None
        raise


def _resumed(desk: Desk, resume: str | bool) -> Run | None:
    """The earlier run to go on from. Raises NoInputError."""
    if not resume:
        return None
    if isinstance(resume, str):
        return runs.load(desk.root, resume)
    on = kaggle.session(os.environ)
    found = previous.restore(on.input, desk.root) if on else next(iter(runs.load_all(desk.root)), None)
    where = f"under {on.input}" if on else f"in {desk.root}"
    desk.say(f"going on from {found.name}" if found else f"no earlier run {where}: it starts from the beginning")
    return found


def _tell(desk: Desk, record: Run, state: RunStatus) -> None:
    """The last lines, and on Kaggle the one that ddpctl on a laptop reads."""
    outcome = state.outcome
    desk.say(f"run {record.name} {state.state}{f', exit code {state.code}' if state.code else ''}: {state.message}")
    if state.code:
        desk.say(f"  logs         {record.logs_at}")
    desk.say(f"  checkpoints  {record.checkpoint_dir}")
    if outcome and outcome.cause == "stopped" and outcome.code != Exit.INTERRUPTED:
        desk.say("  go on with   launch(..., resume=True), on Kaggle with this version's output among the inputs")
    on = kaggle.session(os.environ)
    if on and on.batch and outcome:
        desk.say(OUTCOME + json.dumps({"code": outcome.code, "cause": outcome.cause, "message": outcome.message}))


def _judge(record: Run, state: RunStatus, calls: Path | None = None) -> None:
    """Raise RankError if it failed. A stop that the deadline asked for is no failure."""
    outcome = state.outcome
    if not state.code or (outcome and outcome.cause == "stopped" and outcome.code == Exit.SAVED_TERM):
        return
    rank = outcome.rank if outcome else None
    story = calls / FAILURE.format(rank=rank) if calls and rank is not None else None
    if story is not None and story.exists():
        raise _as_told(pickle.loads(story.read_bytes()), rank, int(state.code))  # noqa: S301 (our own rank wrote it)
    last = ""
    if rank is not None and outcome is not None:
        log = Path(record.folder) / node_name(outcome.node or 0) / rank_log(rank)
        last = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:]) if log.exists() else ""
    raise RankError(state.message, rank=rank, code=int(state.code), traceback=last)


def _as_told(story: Mapping[str, Any], rank: int | None, code: int) -> RankError:
    """The error with the rank's own as its cause."""
    where = f"{story['cell']}, line {story['line']}"
    error = RankError(
        f"rank {rank} failed in {where}: {story['message']}",
        rank=rank,
        cell=story["cell"],
        line=story["line"],
        code=code,
        traceback=story["traceback"],
    )
    if story["original"]:
        try:
            error.__cause__ = pickle.loads(story["original"])  # noqa: S301
        except Exception:  # an exception whose __init__ wants more than its args
            error.__cause__ = None
    return error


def _result(calls: Path) -> Any:
    file = calls / RESULT
    return pickle.loads(file.read_bytes()) if file.exists() else None  # noqa: S301 (rank 0 wrote it)
