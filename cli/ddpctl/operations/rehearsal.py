"""Runs a rehearsal: gives the project to ``python -m ddprun.rehearsal``, and returns the facts of its runs.

On another target, this program is the only rank of a run.
"""

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpctl.command import Command, once
from ddpctl.errors import UnavailableError, writing
from ddpctl.execution.interrupts import code_of
from ddpctl.files.project_files import MAX_BYTES
from ddpctl.job.launch_plan import CHECK_PYTHON, Request, program, script_of
from ddpctl.operations.check_job import run_check
from ddpctl.operations.launcher import AppContext
from ddpwire.exits import Exit
from ddpwire.run_files import parse_json
from ddpwire.work_folder import PLAN, work_folder

TIME_LIMIT_S = 3600.0
# For the Python of the machine that rehearses, in which ddpctl is installed with ddprun.
LIST = "import os; from ddpctl.files.project_files import LIST_ARGV as argv; os.execvp(argv[0], argv)"
DEFAULT_GRACE_S, DEFAULT_IDLE_S = 30.0, 120.0


def rehearse(
    context: AppContext,
    request: Request,
    there: Request | None,
    *,
    steps: int,
    shared: bool,
    links: Sequence[str],
    scenarios: Sequence[str],
) -> tuple[list[dict[str, Any]], int]:
    """Run the scenarios, with progress on stderr, and return the facts of each run. Raises DdpctlError.

    ``there`` is a launch of one rank on another target: the scenarios are run on its machine, else on this one. Also
    return the exit code of Ctrl-C, or 0. After Ctrl-C, the facts are those of the scenarios that were run to their
    end. Nothing is left.
    """
    job, cwd = request.job, Path.cwd()
    command, script = [*program(job.command)], script_of(job.command)
    if script and Path(script).is_relative_to(cwd):
        command[0] = str(Path(script).relative_to(cwd))  # that of the copy
    plan: dict[str, Any] = {"links": [*links], "command": command, "env": [*job.env, *job.secrets]}
    plan |= {
        "nodes": job.max_nodes,
        "gpus": job.max_gpus,
        "ranks": job.local_world_size,
        "grace_s": job.grace or DEFAULT_GRACE_S,
    }
    plan |= {"steps": steps, "shared": shared, "scenarios": [*scenarios]}
    plan["idle_s"] = DEFAULT_IDLE_S if job.hang_timeout is None else job.hang_timeout or math.inf
    is_copy = there is not None and getattr(there.options, "project", "") == "sync"  # it has no other files
    plan |= {"list": "" if is_copy else LIST, "max_bytes": MAX_BYTES}
    if there:
        command = ["-m", "ddprun.rehearsal", json.dumps(plan)]
        checked = replace(there, name=None, job=replace(there.job, command=tuple(command), hang_timeout=0))
        limit = f"{TIME_LIMIT_S:.0f}s"
        _, result, _ = run_check(context, checked, name="rehearse", show=context.emit, time_limit=limit)
        return result["runs"], 128 + result["signal"] if result["signal"] else 0
    python = getattr(request.options, "python", "") or sys.executable
    context.executor.perform(once(Command(argv=(python, "-c", CHECK_PYTHON)))).check(f"{python} cannot run ranks")
    with ExitStack() as stack:
        with writing(tempfile.gettempdir()):
            work = stack.enter_context(work_folder(plan))
        argv = (python, "-P", "-m", "ddprun.rehearsal", str(work / PLAN))
        env = {**job.env, "TMPDIR": str(work)}  # torch makes a folder when it is imported
        runs: Any = []
        code = 0
        try:
            run = Command(argv=argv, env=env, mode="stream", timeout_s=TIME_LIMIT_S)
            output = context.executor.perform(once(run))
        except KeyboardInterrupt as error:
            code = code_of(error)
        with suppress(OSError, ValueError):
            runs = parse_json((work / "facts.json").read_bytes())
        if not runs and not code:
            failure = UnavailableError(f"the rehearsal has no result: {output.last_line()}")
            failure.code = (
                Exit(output.returncode) if output.returncode in (Exit.NO_INPUT, Exit.CONFIG) else failure.code
            )
            raise failure
        return runs, code
