"""Runs checks as runs: bench and doctor of ddpcheck, and rehearsals. Removes bad machines from a launch request.

A check prints the output of rank 0, and its run is removed after its result is read. The newest result for each target
is saved, so that the next result can be compared with it.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ddpctl import targets
from ddpctl.errors import ConfigError, DdpctlError, UnavailableError
from ddpctl.job.launch_plan import Request
from ddpctl.job.spec import JobSpec
from ddpctl.operations import launcher, removal
from ddpctl.operations.launcher import AppContext
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpctl.text import one_line, table
from ddpwire import log_record, names
from ddpwire.exits import Exit
from ddpwire.machine import format_ranges
from ddpwire.run_files import parse_json, read_record, write_atomic

TIME_LIMIT = "30m"  # for the run of a check, including the start of its ranks
CHECKS = ".checks"  # a folder in the folder of the runs
MARKS = {"ok": "ok", "warning": "warn", "bad": "BAD", "not looked at": "-"}  # in the table of the doctor


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
            removals, refused = removal.choose_removals(context, (run,))
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


# The doctor


def job_of(job: JobSpec) -> JobSpec:
    """Return the job that runs the doctor on the nodes of ``job``. It has one rank per node, which sees all GPUs.

    The ranks connect to each other through the master port only, because other ports may be closed.
    """
    env = {**job.env, names.ONE_PORT: "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return replace(job, command=("-m", "ddpcheck", "doctor"), ranks=1, env=env)


def examine(context: AppContext, request: Request) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the doctor's result, and the machine of each node if the target chooses machines. Raises DdpctlError.

    If the target refuses a machine, the reason is a finding, and only the other machines are checked. If a node
    prevents the start of ddprun, the reason is the only finding.
    """
    request = replace(request, job=job_of(request.job), name=None, resumes=None, wait_s=None)
    refused: Any = {}  # each machine that the target has checked → the (check, reason) of each refusal
    run, answer = None, dict[str, Any](nodes=[], results=[])
    try:
        run, answer = _run(context, request)
        refused = run.handle.get("machines", {})
    except DdpctlError as error:
        refused = error.fields.get("machines", {})
        ready = [machine for machine, problems in refused.items() if not problems]
        if not refused or (not ready and isinstance(error, ConfigError)):
            raise
        if ready:
            least = min(map(request.job.gpus_of, range(request.job.max_nodes)))
            job = replace(request.job, nodes=str(min(len(ready), request.job.max_nodes)), gpus=least)
            options = targets.make(request.kind, request.options).without({*refused} - {*ready}, job)
            run, answer = _run(context, replace(request, job=job, options=options))
    examined = launcher.target_of(run).machines(run) if run else ()
    machines = tuple(refused) or examined
    for finding in (*answer["nodes"], *answer["results"]) if refused else ():
        finding["node"] = machines.index(examined[finding["node"]])
    for node, (machine, problems) in enumerate(refused.items()):
        answer["nodes"] += [{"node": node, "host": machine, "address": machine}] if problems else []
        answer["results"] += [_refusal(node, check, text) for check, text in problems]
    bad = [sentence(finding) for finding in answer["results"] if finding["status"] == "bad"]
    result = {"check": "doctor", **answer, "code": int(Exit.UNAVAILABLE if bad else Exit.OK), "findings": bad}
    keep_result(context, request.target, result, lines(result))
    return result, machines


def _run(context: AppContext, request: Request) -> tuple[Run, dict[str, Any]]:
    """Return the run and the doctor's result. If a node prevented the start of ddprun, the result is its message."""
    try:
        run, result, _ = run_check(context, request, name="doctor", show=lambda _: None)
    except NoResultError as error:
        if error.outcome is None or error.outcome.node is None:
            raise
        nodes = [{"node": node, "host": "unknown", "address": "unknown"} for node in range(request.job.max_nodes)]
        results = [_refusal(error.outcome.node, "preflight", error.outcome.message)]
        return error.run, {"nodes": nodes, "results": results}
    return run, result


def _refusal(node: int, check: str, problem: str) -> dict[str, Any]:
    advice = {"expected": "what a launch needs", "todo": "repair it, and run the doctor again"}
    return {"node": node, "check": check, "status": "bad", "value": problem, **advice}


def sentence(finding: Mapping[str, Any]) -> str:
    """Return a finding as one line."""
    where = f"node {finding['node']}, {finding['check']}: {finding['status']}"
    return f"{where}: {finding['value']}; expected: {finding['expected']}; {finding['todo']}"


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return a table with one row per check and one column per group of nodes with the same results.

    The lines below the table are the warnings, the reasons why checks were skipped, and the bad results.
    """
    results = result["results"]
    marks = {(finding["check"], finding["node"]): MARKS[finding["status"]] for finding in results}
    seen = {check for (check, _), mark in marks.items() if mark != "-"}
    checks = [check for check in dict.fromkeys(check for check, _ in marks) if check in seen]
    columns: dict[tuple[str, ...], list[int]] = {}
    for node in sorted(entry["node"] for entry in result["nodes"]):
        columns.setdefault(tuple(marks.get((check, node), "-") for check in checks), []).append(node)
    heads = ("", *(f"node {format_ranges(nodes)}" for nodes in columns.values()))
    unknown: dict[str, list[Mapping[str, Any]]] = {}
    for finding in results:
        if finding["status"] == "not looked at":
            unknown.setdefault(finding["value"], []).append(finding)
    return [
        *table([heads, *((check, *row) for check, *row in zip(checks, *columns, strict=True))]),
        *(sentence(finding) for finding in results if finding["status"] == "warning"),
        *(
            f"not looked at on node {format_ranges({finding['node'] for finding in alike})}: "
            f"{', '.join(dict.fromkeys(finding['check'] for finding in alike))} ({reason})"
            for reason, alike in unknown.items()
        ),
        *(sentence(finding) for finding in results if finding["status"] == "bad"),
    ]


def only_sound(context: AppContext, request: Request) -> Request:
    """Return the request without the machines that the doctor finds bad. Other machines of the target replace them.

    Raises DdpctlError, for example if there are too few healthy machines.
    """
    checking = replace(context, executor=context.executor.another())  # a check filters the output of its executor
    try:
        while True:
            result, machines = examine(checking, request)
            for line in lines(result):
                context.emit(line)
            bad = sorted({finding["node"] for finding in result["results"] if finding["status"] == "bad"})
            if not bad:
                return request
            left_out = [machines[node] for node in bad] if machines else []
            options = targets.make(request.kind, request.options).without({*left_out}, request.job)
            if options is None:
                which = f"node{'s' * (len(bad) > 1)} {', '.join(map(str, bad))}"
                raise UnavailableError(
                    f"nothing was started: the doctor found errors on {which} (see above)", nodes=bad
                )
            request = replace(request, options=options)
            if len(result["nodes"]) - len(bad) >= request.job.max_nodes:  # enough spare machines were checked, too
                context.emit(f"{', '.join(left_out)} left out")
                return request
            context.emit(f"{', '.join(left_out)} left out; the doctor checks the other machines")
    finally:
        checking.executor.close()
