"""The subcommand ``rehearse``. It runs a script on CPU ranks of this machine with everything that may happen to it."""

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ddpctl import targets
from ddpctl.commands.arguments import Json, print_result
from ddpctl.commands.launch import PROGRAM, File, Gpus, Nodes, Target, request_of_flags
from ddpctl.diagnosis.rehearsal import SCENARIOS, Row, judge
from ddpctl.errors import DdpctlError, UsageError
from ddpctl.job.launch_plan import Request
from ddpctl.operations import rehearsal
from ddpctl.operations.launcher import open_context
from ddpctl.text import counted, format_duration
from ddpwire.exits import Exit

COLORS = {"ok": "green", "fault": "bold red", "unknown": "yellow"}
DEFAULT = "2"  # nodes, and ranks of a node


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
    there, context = _find_target(flags, target), open_context()
    request = request_of_flags(flags | {"target": "local" if there or target is None else target})
    if request.job.min_nodes < request.job.max_nodes:
        raise UsageError(f"--nodes {nodes}: a rehearsal has a fixed number of nodes: expected such as --nodes 2")
    if request.job.is_uneven:
        raise UsageError(f"--gpus {gpus}: a rehearsal has the same number of ranks on each node: give one number")
    if there and not target:
        context.emit(f"rehearse: it runs on this machine; --target {there.target} runs it on a machine of that target")
    began = time.monotonic()
    runs, interrupted = rehearsal.rehearse(
        context, request, there if target else None, steps=steps, shared=shared, links=link or [], scenarios=scenarios
    )
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
