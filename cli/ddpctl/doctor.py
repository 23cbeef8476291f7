"""Runs the doctor (ddpcheck) on a request's target. Returns its findings, or the request for sound machines only."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ddpctl import check_job, launcher
from ddpctl.check_job import CheckRun
from ddpctl.errors import DdpctlError, UnavailableError
from ddpctl.launcher import AppContext, Request
from ddpctl.spec import JobSpec
from ddpwire import names
from ddpwire.exits import Exit


def job_of(job: JobSpec) -> JobSpec:
    """Return the doctor's job for a job's nodes: one rank per node, which sees all GPUs of the node.

    The ranks meet on the master port, so that the doctor works even if no other port is open.
    """
    env = {**job.env, names.ONE_PORT: "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return replace(job, command=("-m", "ddpcheck", "doctor"), ranks=1, env=env)


def examine(context: AppContext, request: Request, *, show: Callable[[str], None]) -> tuple[CheckRun, dict[str, Any]]:
    """Run the doctor on a request's target and nodes; return its run and its result. Raises DdpctlError.

    If ddprun refuses to start because of one node, ddprun's message is the finding.
    """
    request = replace(request, job=job_of(request.job), name=None, resumes=None, wait_s=None)
    check = check_job.run_check(context, request, show=show)
    if check.result is not None:
        return check, check.result
    outcome = check.state.outcome
    if outcome is None or outcome.node is None:
        error = DdpctlError(
            f"the doctor came to no result: {check.state.message}", hint=f"ddpctl logs {check.run.name}"
        )
        error.code = check.code or Exit.SOFTWARE
        raise error
    finding = {"node": outcome.node, "check": "preflight", "status": "bad", "value": outcome.message}
    line = f"node {outcome.node}, preflight: bad: {outcome.message}"
    show(line)
    return check, {"check": "doctor", "code": int(Exit.UNAVAILABLE), "findings": [line], "results": [finding]}


def only_sound(context: AppContext, request: Request) -> Request:
    """Return the request for sound machines only: bad machines are left out if the target has others.

    Raises DdpctlError, also if there are too few sound machines.
    """
    checking = replace(context, executor=context.executor.another())  # a check filters the output of its executor
    try:
        while True:
            check, result = examine(checking, request, show=context.emit)
            bad = sorted({one["node"] for one in result["results"] if one["status"] == "bad"})
            if not bad:
                return request
            options, left_out = launcher.target_of(check.run).without(check.run, bad)
            if options is None:
                which = f"node{'s' * (len(bad) > 1)} {', '.join(map(str, bad))}"
                raise UnavailableError(f"nothing was started: the doctor finds {which} bad (above)", nodes=bad)
            context.emit(f"{', '.join(left_out)} left out; the doctor looks at the others")
            request = replace(request, options=options)
    finally:
        checking.executor.close()
