"""Runs the doctor (ddpcheck) on a request's target; returns its findings, or a request for healthy machines only."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ddpctl import check_job, launcher, targets
from ddpctl.errors import ConfigError, DdpctlError, UnavailableError
from ddpctl.launcher import AppContext, Request
from ddpctl.run_store import Run
from ddpctl.spec import JobSpec
from ddpctl.text import table
from ddpwire import names
from ddpwire.exits import Exit
from ddpwire.machine import format_ranges

MARKS = {"ok": "ok", "warning": "warn", "bad": "BAD", "not looked at": "-"}


def job_of(job: JobSpec) -> JobSpec:
    """Return the doctor's job for the nodes of a job: one rank per node, which sees all GPUs of the node.

    The ranks meet on the master port, so that the doctor works even if no other port is open.
    """
    env = {**job.env, names.ONE_PORT: "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return replace(job, command=("-m", "ddpcheck", "doctor"), ranks=1, env=env)


def examine(context: AppContext, request: Request) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the doctor's result, and the machine of each node if the target chooses machines. Raises DdpctlError.

    If the target refuses a machine, the refusal is a finding, and the other machines are checked without it. If ddprun
    refuses to start because of a node, the refusal is the only finding.
    """
    request = replace(request, job=job_of(request.job), name=None, resumes=None, wait_s=None)
    refused: Any = {}  # each machine that the target has checked → the (check, reason) of each refusal
    run, found = None, dict[str, Any](nodes=[], results=[])
    try:
        run, found = _run(context, request)
        refused = run.handle.get("machines", {})
    except DdpctlError as error:
        refused = error.fields.get("machines", {})
        ready = [machine for machine, why in refused.items() if not why]
        if not refused or (not ready and isinstance(error, ConfigError)):
            raise
        if ready:
            job = replace(request.job, nodes=str(min(len(ready), request.job.max_nodes)))
            options = targets.make(request.kind, request.options).without({*refused} - {*ready}, job)
            run, found = _run(context, replace(request, job=job, options=options))
    examined = launcher.target_of(run).machines(run) if run else ()
    machines = tuple(refused) or examined
    for one in (*found["nodes"], *found["results"]) if refused else ():
        one["node"] = machines.index(examined[one["node"]])
    for node, (machine, why) in enumerate(refused.items()):
        found["nodes"] += [{"node": node, "host": machine, "address": machine}] if why else []
        found["results"] += [_refusal(node, check, text) for check, text in why]
    bad = [sentence(one) for one in found["results"] if one["status"] == "bad"]
    result = {"check": "doctor", **found, "code": int(Exit.UNAVAILABLE if bad else Exit.OK), "findings": bad}
    check_job.keep_result(context, request.target, result, lines(result))
    return result, machines


def _run(context: AppContext, request: Request) -> tuple[Run, dict[str, Any]]:
    """Return the run and its result. If ddprun refused to start because of a node, the result is its message."""
    try:
        check = check_job.run_check(context, request, show=lambda _: None)
    except check_job.NoResultError as error:
        if error.outcome is None or error.outcome.node is None:
            raise
        nodes = [{"node": node, "host": "unknown", "address": "unknown"} for node in range(request.job.max_nodes)]
        results = [_refusal(error.outcome.node, "preflight", error.outcome.message)]
        return error.run, {"nodes": nodes, "results": results}
    return check.run, check.result


def _refusal(node: int, check: str, why: str) -> dict[str, Any]:
    advice = {"expected": "what a launch needs", "todo": "mend it, and run the doctor again"}
    return {"node": node, "check": check, "status": "bad", "value": why, **advice}


def sentence(one: Mapping[str, Any]) -> str:
    """Return a finding as one line."""
    where = f"node {one['node']}, {one['check']}: {one['status']}"
    return f"{where}: {one['value']}; expected: {one['expected']}; {one['todo']}"


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return a table with one row per check and one column per group of nodes with the same results.

    Below the table is a line for each warning, for each reason why something was not checked, and for each bad result.
    """
    results = result["results"]
    marks = {(one["check"], one["node"]): MARKS[one["status"]] for one in results}
    seen = {check for (check, _), mark in marks.items() if mark != "-"}
    checks = [check for check in dict.fromkeys(check for check, _ in marks) if check in seen]
    columns: dict[tuple[str, ...], list[int]] = {}
    for node in sorted(one["node"] for one in result["nodes"]):
        columns.setdefault(tuple(marks.get((check, node), "-") for check in checks), []).append(node)
    heads = ("", *(f"node {format_ranges(nodes)}" for nodes in columns.values()))
    unknown: dict[str, list[Mapping[str, Any]]] = {}
    for one in results:
        if one["status"] == "not looked at":
            unknown.setdefault(one["value"], []).append(one)
    return [
        *table([heads, *((check, *row) for check, *row in zip(checks, *columns, strict=True))]),
        *(sentence(one) for one in results if one["status"] == "warning"),
        *(
            f"not looked at on node {format_ranges({one['node'] for one in alike})}: "
            f"{', '.join(dict.fromkeys(one['check'] for one in alike))} ({why})"
            for why, alike in unknown.items()
        ),
        *(sentence(one) for one in results if one["status"] == "bad"),
    ]


def only_sound(context: AppContext, request: Request) -> Request:
    """Return the request for healthy machines only: bad machines are replaced if the target has others.

    Raises DdpctlError, for example if there are too few healthy machines.
    """
    checking = replace(context, executor=context.executor.another())  # a check filters the output of its executor
    try:
        while True:
            result, machines = examine(checking, request)
            for line in lines(result):
                context.emit(line)
            bad = sorted({one["node"] for one in result["results"] if one["status"] == "bad"})
            if not bad:
                return request
            left_out = [machines[node] for node in bad] if machines else []
            options = targets.make(request.kind, request.options).without({*left_out}, request.job)
            if options is None:
                which = f"node{'s' * (len(bad) > 1)} {', '.join(map(str, bad))}"
                raise UnavailableError(f"nothing was started: the doctor finds {which} bad (above)", nodes=bad)
            request = replace(request, options=options)
            if len(result["nodes"]) - len(bad) >= request.job.max_nodes:  # enough spares were examined with them
                context.emit(f"{', '.join(left_out)} left out")
                return request
            context.emit(f"{', '.join(left_out)} left out; the doctor looks at the others")
    finally:
        checking.executor.close()
