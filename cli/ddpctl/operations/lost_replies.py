"""A launch whose reply is lost: look for its run by its uid, continue it or undo it, or say that it is unknown.

docs/decisions/0050-lost-replies.md has the reasons.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ddpctl.errors import CannotWriteError, DdpctlError, UnavailableError
from ddpctl.execution.executor import Executor
from ddpctl.runs import run_store
from ddpctl.runs.run_store import Run
from ddpctl.targets import Lookup, Submission, Target
from ddpctl.text import one_line

ANSWER_GAP_S = 30.0  # a controller may take so long to act on a request whose sender no longer waits
LOCATE_S = 100.0  # how long to look for a run after a lost reply
PROGRESS_S = 5.0


def settle(
    executor: Executor, target: Target, run: Run, error: BaseException, *, emit: Callable[[str], None]
) -> Submission:
    """Return the submission of a failed launch if only the reply to it was lost, and all of its nodes exist.

    Otherwise, stop what the launch has started, delete its record if nothing of it exists, and raise ``error``, or
    UnavailableError if it is unknown whether something exists.
    """
    executor.kill_started()
    fields = error.fields if isinstance(error, DdpctlError) else {"submission": None}
    lookup, gone = Lookup(state="absent"), not executor.may_have_started or "is_undone" in fields
    try:
        if "submission" in fields and not gone and not run.handle:
            emit(f"{error or 'interrupted'}: looking for run '{run.name}', which may have been started")
            lookup = _locate(executor, target, run, emit)
            submission = fields["submission"]
            if isinstance(submission, Submission) and lookup.state == "exists" and lookup.is_whole:
                return replace(submission, handle={**lookup.handle, **submission.handle})
        run = replace(run, handle=run.handle or lookup.handle)
        gone = gone or executor.perform(target.stop(run, signal="KILL"))
        if not lookup.is_whole:  # another node may have started since
            lookup = _locate(executor, target, run, emit)
            gone = executor.perform(target.stop(run, signal="KILL"))
    except DdpctlError as failure:
        gone = False
        emit(f"run '{run.name}' was not stopped: {failure}")
    except KeyboardInterrupt:
        lookup, gone = Lookup(state="unknown"), False
    if gone and lookup.state != "unknown":
        run_store.discard(Path(run.folder))
        if isinstance(error, KeyboardInterrupt):
            emit(f"the launch of {run.name} was undone")
        raise error
    raise _keep_record(run, lookup, error, emit)


def _keep_record(run: Run, lookup: Lookup, error: BaseException, emit: Callable[[str], None]) -> BaseException:
    """Keep the record of a run of which something may exist. Return the error of its launch."""
    with suppress(CannotWriteError):  # the record without the handle remains
        run_store.save(run)
    to_do = f"ddpctl status {run.name} shows whether it exists, and ddpctl stop {run.name} ends it"
    if lookup.state == "unknown" and isinstance(error, DdpctlError):
        return UnavailableError(f"{error.message}; it is unknown whether run '{run.name}' was started", hint=to_do)
    emit(f"parts of {run.name} may still exist: {to_do}")
    return error


def _locate(executor: Executor, target: Target, run: Run, emit: Callable[[str], None]) -> Lookup:
    """Look for a run until it is found, or until two answers ``ANSWER_GAP_S`` apart say that it does not exist."""
    started, first_absent = time.monotonic(), math.inf
    while True:
        lookup = _look_once(executor, target, run)
        now = time.monotonic()
        if lookup.state == "absent" and not (lookup.is_final or now - first_absent >= ANSWER_GAP_S):
            first_absent = min(first_absent, now)
            lookup = Lookup(state="unknown", message="it does not exist yet")
        if lookup.state != "unknown" or now - started >= LOCATE_S:
            return lookup
        emit(f"  looking for run '{run.name}': {now - started:.0f} s, {one_line(lookup.message)}")
        time.sleep(min(PROGRESS_S, ANSWER_GAP_S))


def _look_once(executor: Executor, target: Target, run: Run) -> Lookup:
    try:
        return executor.perform(target.locate(run))
    except DdpctlError as error:
        return Lookup(state="unknown", message=str(error))


def with_handle(executor: Executor, target: Target, run: Run) -> Run:
    """Return the run, with its handle if its launch was killed before it could save it. Raises UnavailableError."""
    launch = run_store.unfinished_launch(run)
    if run.handle or not run.uid or launch is None or launch.going:
        return run
    lookup = _look_once(executor, target, run)
    if lookup.state == "unknown":
        raise UnavailableError(f"it is unknown whether run '{run.name}' was started: {lookup.message}")
    if lookup.handle:
        run = replace(run, handle=lookup.handle)
        with suppress(CannotWriteError):  # it is looked for again
            run_store.save(run)
    return run
