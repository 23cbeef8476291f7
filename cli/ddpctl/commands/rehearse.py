"""The subcommand ``rehearse``. It runs a script on CPU ranks of this machine with everything that may happen to it.

The command gives the project to ``python -m ddprun.rehearsal``, and judges the facts of its runs. On another target,
this program is the only rank of a run.
"""

import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ddpctl import targets
from ddpctl.command import Command, once
from ddpctl.commands.arguments import Json, print_result
from ddpctl.commands.launch import PROGRAM, File, Gpus, Nodes, Target, request_of_flags
from ddpctl.diagnosis.rehearsal import SCENARIOS, Row, judge
from ddpctl.errors import DdpctlError, UnavailableError, UsageError, writing
from ddpctl.execution.interrupts import code_of
from ddpctl.files.project_files import MAX_BYTES
from ddpctl.job.launch_plan import CHECK_PYTHON, Request, program, script_of
from ddpctl.job.spec import JobSpec
from ddpctl.operations.checks import run_check
from ddpctl.operations.launcher import AppContext, open_context
from ddpctl.text import counted, format_duration
from ddpwire.exits import Exit
from ddpwire.run_files import parse_json
from ddpwire.work_folder import PLAN, work_folder

COLORS = {"ok": "green", "fault": "bold red", "unknown": "yellow"}
DEFAULT = "2"  # nodes, and ranks of a node
TIME_LIMIT_S = 3600.0
# For the Python of the machine that rehearses, in which ddpctl is installed with ddprun.
LIST = "import os; from ddpctl.files.project_files import LIST_ARGV as argv; os.execvp(argv[0], argv)"
DEFAULT_GRACE_S, DEFAULT_IDLE_S = 30.0, 120.0


def rehearse(
    nodes: Nodes = None,
    gpus: Gpus = None,
    ranks: Annotated[str | None, typer.Option("--ranks", metavar="R")] = None,
    steps: Annotated[int, typer.Option("--steps", min=4, metavar="N", help="How many steps of a run to observe.")] = 60,
    only: Annotated[
        str | None, typer.Option("--only", metavar="NAMES", help=f"Some of {', '.join(SCENARIOS)}.")
    ] = None,
    shared: Annotated[bool, typer.Option("--shared", help="One folder for all nodes, as on a shared disk.")] = False,
    link: Annotated[list[str] | None, typer.Option("--link", metavar="PATH", help="Data that is only read.")] = None,
    hang_timeout: Annotated[
        str | None, typer.Option("--hang-timeout", metavar="S", help="Longest time of a step; 0: any [default: 120].")
    ] = None,
    target: Target = None,
    file: File = None,
    as_json: Json = False,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- SCRIPT ARGS...]", help=PROGRAM, show_default=False)
    ] = None,
) -> None:
    """Disturb a script as a cluster will, and say what it loses.

    The unchanged script runs on CPU ranks of this machine, or of one machine of --target, by default on 2 nodes of 2
    ranks, again and again. Each time something happens to it: a signal, a kill, a full disk. The exit code is 1 if a
    row of the table is a fault, and 69 if no step of the script was seen.
    """
    scenarios = [*SCENARIOS] if only is None else only.split(",")
    if wrong := [name for name in scenarios if name not in SCENARIOS]:
        raise UsageError(f"--only: {wrong[0]!r} is not a disturbance: expected some of {', '.join(SCENARIOS)}")
    flags: dict[str, Any] = {"nodes": nodes or DEFAULT, "gpus": gpus or DEFAULT, "ranks": ranks}
    flags |= {"file": file, "hang_timeout": hang_timeout, "device": "cpu", "command": command or []}
    flags |= {"spares": "0", "checkpoint_copies": "1"}  # one machine has neither
    flags = {name: value for name, value in flags.items() if value is not None}
    remote, context = _find_target(flags, target), open_context()
    request = request_of_flags(flags | {"target": "local" if remote or target is None else target})
    if request.job.min_nodes < request.job.max_nodes:
        raise UsageError(f"--nodes {nodes}: a rehearsal has a fixed number of nodes: expected such as --nodes 2")
    if request.job.is_uneven:
        raise UsageError(f"--gpus {gpus}: a rehearsal has the same number of ranks on each node: give one number")
    if remote and not target:
        context.emit(f"rehearse: it runs on this machine; --target {remote.target} runs it on a machine of that target")
    began = time.monotonic()
    plan = {"links": link or [], "steps": steps, "shared": shared, "scenarios": scenarios, **_plan_of(request.job)}
    if target and remote:
        is_copy = getattr(remote.options, "project", "") == "sync"  # it has no other files
        runs, interrupted = _rehearse_there(context, remote, plan if not is_copy else {**plan, "list": ""})
    else:
        runs, interrupted = _rehearse_here(context, request, plan)
    rows, seconds = judge(runs, scenarios if interrupted else ()), time.monotonic() - began
    verdicts = {row.id: row.verdict for row in rows}
    code: int = Exit.OK if verdicts.get("steps") == "ok" else Exit.UNAVAILABLE
    code = Exit.SCRIPT if "fault" in verdicts.values() else code
    if interrupted:
        code = interrupted
        print("\nddpctl: the rehearsal was interrupted: what it did not run to the end is unknown", file=sys.stderr)
    result: dict[str, Any] = {"code": int(code), "seconds": round(seconds, 1), "rows": [asdict(row) for row in rows]}
    print_result(result, [table(rows, seconds, len(runs))], as_json=as_json)
    raise typer.Exit(int(code))


def _find_target(flags: dict[str, Any], target: str | None) -> Request | None:
    """Return a launch of one rank on ``target``, or on the default target if it is None. None: this machine.

    Raises DdpctlError if the target cannot be used, and returns None if the default one cannot.
    """
    try:
        request = request_of_flags(flags | {"target": target, "nodes": "1", "gpus": "1", "ranks": "1"})
    except DdpctlError:
        if target:
            raise
        return None
    can = targets.capabilities(request.kind)
    if "tethered" in can or ("interrupt" not in can and not target):
        return None
    if "interrupt" not in can:
        reason = f"Ctrl-C could not end a rehearsal on a target of kind {request.kind}"
        advice = "run ddpctl rehearse on this machine" + f", or in a shell on a machine of {target!r}" * ("stop" in can)
        raise UsageError(f"--target {target}: {reason}", hint=advice)
    return request


def _plan_of(job: JobSpec) -> dict[str, Any]:
    """Return what ``ddprun.rehearsal`` must know about a job."""
    command, script = [*program(job.command)], script_of(job.command)
    if script and Path(script).is_relative_to(Path.cwd()):
        command[0] = str(Path(script).relative_to(Path.cwd()))  # that of the copy
    return {
        "command": command,
        "env": [*job.env, *job.secrets],
        "nodes": job.max_nodes,
        "gpus": job.max_gpus,
        "ranks": job.local_world_size,
        "grace_s": job.grace or DEFAULT_GRACE_S,
        "idle_s": DEFAULT_IDLE_S if job.hang_timeout is None else job.hang_timeout or math.inf,
        "list": LIST,
        "max_bytes": MAX_BYTES,
    }


def _rehearse_there(context: AppContext, remote: Request, plan: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Run the scenarios on the machine of ``remote``, a launch of one rank. Return what ``_rehearse_here`` returns."""
    job = replace(remote.job, command=("-m", "ddprun.rehearsal", json.dumps(plan)), hang_timeout=0)
    checked, limit = replace(remote, name=None, job=job), f"{TIME_LIMIT_S:.0f}s"
    _, result, _ = run_check(context, checked, name="rehearse", show=context.emit, time_limit=limit)
    return result["runs"], 128 + result["signal"] if result["signal"] else 0


def _rehearse_here(context: AppContext, request: Request, plan: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Run the scenarios on this machine, with progress on stderr, and return the facts of each run.

    Also return the exit code of Ctrl-C, or 0. After Ctrl-C, the facts are those of the scenarios that were run to their
    end. Nothing is left. Raises DdpctlError.
    """
    python = getattr(request.options, "python", "") or sys.executable
    context.executor.perform(once(Command(argv=(python, "-c", CHECK_PYTHON)))).check(f"{python} cannot run ranks")
    with ExitStack() as stack:
        with writing(tempfile.gettempdir()):
            work = stack.enter_context(work_folder(plan))
        argv = (python, "-P", "-m", "ddprun.rehearsal", str(work / PLAN))
        env = {**request.job.env, "TMPDIR": str(work)}  # torch makes a folder when it is imported
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
            if output.returncode in (Exit.NO_INPUT, Exit.CONFIG):
                failure.code = Exit(output.returncode)
            raise failure
        return runs, code


def table(rows: Sequence[Row], seconds: float, runs: int) -> str:
    """Return the table of all answers, and below it the lines of code that mend the faults."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = shutil.get_terminal_size((120, 24)).columns
    console = Console(width=width, highlight=False, force_terminal=sys.stdout.isatty())
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title, limits in (("QUESTION", {"min_width": 20, "ratio": 2}), ("", {"width": 7}), ("EVIDENCE", {"ratio": 5})):
        grid.add_column(title, justify="left", **limits)  # type: ignore[arg-type]
    for row in rows:
        grid.add_row(row.question, Text(row.verdict, COLORS[row.verdict]), Text(row.evidence))
    counts = [f"{number} {name}" for name in COLORS if (number := sum(row.verdict == name for row in rows))]
    with console.capture() as captured:
        console.print(grid)
        for mend in dict.fromkeys(row.mend for row in rows if row.mend):
            console.print(Text(f"\nmends {', '.join(row.id for row in rows if row.mend == mend)} (docs/script.md):"))
            console.print(*(Text(f"    {line}") for line in mend), sep="\n", soft_wrap=True)
        console.print(f"\n{', '.join(counts)}, in {counted(runs, 'run')} and {format_duration(seconds)}")
    return captured.get().rstrip("\n")
