"""Launches a check as a run, prints the output of rank 0, reads the result, and removes the run.

A check is a module of ddpcheck, or a rehearsal.

The newest result for each target is saved, so that the next result can be compared with it.
"""

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ddpctl.errors import DdpctlError
from ddpctl.job.launch_plan import Request
from ddpctl.operations import launcher, removal
from ddpctl.operations.launcher import AppContext
from ddpctl.runs import run_store
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpctl.text import one_line
from ddpwire import log_record
from ddpwire.exits import Exit
from ddpwire.run_files import parse_json, read_record, write_atomic

TIME_LIMIT = "30m"  # for the run of a check, including the start of its ranks
CHECKS = ".checks"  # a folder in the folder of the runs


class NoResultError(DdpctlError):
    """A check ended without a result. The exit code of the check's run is the exit code of the error."""

    def __init__(self, run: Run, state: RunStatus, code: int) -> None:
        kept = "" if state.state == "stopped" else f"ddpctl logs {run.name}"
        super().__init__(f"{run.name} has no result: {one_line(state.message)}", hint=kept)
        self.run, self.outcome, self.code = run, state.outcome, code or Exit.SOFTWARE


def run_check(
    context: AppContext, request: Request, *, name: str, show: Callable[[str], None], time_limit: str = TIME_LIMIT
) -> tuple[Run, dict[str, Any], list[str]]:
    """Launch ``request``, whose command prints a record with ``--record``, and wait for its end. Raises DdpctlError.

    Return the run, its result as data, and the lines that rank 0 printed for the user. ``show`` is called with each of
    these lines. Ctrl-C stops the run, as in an attached launch. The run is removed if it has a result or was stopped.
    """
    command = (*request.job.command, "--record")
    job = replace(
        request.job, command=command, name=name, max_restarts=0, time_limit=time_limit, checkpoint_copies=1, spares=0,
        notify=(),
    )  # fmt: skip
    quiet = replace(context, emit=lambda _: None)
    run = launcher.start(quiet, replace(request, job=job), attached=True)
    context.emit(f"{name} runs as {run.name} on {run.target}: Ctrl-C stops it")
    output = _Output(show, prefix="" if job.world_size == 1 else r"\[node[0-9]+ rank0\] ")
    context.executor.filter_stdout(output)
    _, code = launcher.follow(context, run, launched=True)
    result = log_record.unpack_result("\n".join(output.record))
    if code and not (result and result.get("signal")):  # a check that a signal has ended may have a part of its result
        result = None
    state = launcher.status(context, (run,))[0]  # has the message, which follow() omits because it is in the log
    if result or state.state == "stopped":
        try:
            removals, refused = removal.choose_removals(context, (run,), run_store.load_all(context.root))
            for error in (*refused, *removal.remove_runs(context, removals)):
                if isinstance(error, DdpctlError):
                    raise error
        except DdpctlError as error:  # the check itself has succeeded
            context.emit(f"{run.name} is not removed: {error}")
    if result is None:
        raise NoResultError(run, state, code)
    return run, result, output.lines


class _Output:
    """Filters the streamed logs of a run. It stores the lines of the result, and shows the other lines of rank 0."""

    def __init__(self, show: Callable[[str], None], prefix: str) -> None:
        self.record, self.lines = list[str](), list[str]()
        self._show, self._rest = show, b""
        self._of_rank_0 = re.compile(rf"{prefix}(?!\[node|\[[EWI][0-9]{{4}} )")  # not the logs of ddprun and torch

    def __call__(self, data: bytes) -> bytes:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in (line_bytes.decode(errors="replace") for line_bytes in whole):
            if log_record.RESULT_LINE.match(line):
                self.record.append(line)
            elif match := self._of_rank_0.match(line):
                self.lines.append(line[match.end() :])
                with suppress(OSError):  # the verb reports a failure of stdout after it has the result
                    self._show(self.lines[-1])
        return b""


def last_result(context: AppContext, target: str, check: str) -> dict[str, Any] | None:
    """Return the newest result of a check on a target, or None if there is none.

    The result includes its ``time``, and its ``lines`` for the user.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        result: Any = parse_json(read_record(_kept(context, target, check)))
        return {**result, "check": check, "lines": [*map(str, result["lines"])], "time": float(result["time"])}
    return None


def keep_result(context: AppContext, target: str, result: dict[str, Any], lines: Sequence[str]) -> None:
    """Save the result for the next check and for reports. A write error is ignored."""
    path = _kept(context, target, result["check"])
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, (json.dumps({**result, "time": time.time(), "lines": [*lines]}) + "\n").encode())


def _kept(context: AppContext, target: str, check: str) -> Path:
    return context.root / CHECKS / f"{check}-{quote(target, safe='')}.json"
