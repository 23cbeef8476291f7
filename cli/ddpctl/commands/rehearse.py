"""The subcommand ``rehearse``. It runs a script on CPU ranks of this machine with everything that may happen to it."""

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ddpctl.commands.arguments import Json, print_result
from ddpctl.commands.launch import PROGRAM, File, Gpus, Nodes, request_of_flags
from ddpctl.diagnosis.rehearsal import SCENARIOS, Row, judge
from ddpctl.errors import UsageError
from ddpctl.execution.interrupts import code_of
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
    target: Annotated[str | None, typer.Option("--target", "-t", metavar="T", help="Only local, so far.")] = None,
    file: File = None,
    as_json: Json = False,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- SCRIPT ARGS...]", help=PROGRAM, show_default=False)
    ] = None,
) -> None:
    """Disturb a script as a cluster will, and say what it loses.

    The unchanged script runs on CPU ranks of this machine, by default on 2 nodes of 2 ranks, again and again. Each time
    something happens to it: a signal, a kill, a full disk. The exit code is 1 if a row of the table is a fault, and 69
    if no step of the script was seen.
    """
    if target not in (None, "local"):
        advice = f"log in to a machine of {target!r}, and run ddpctl rehearse there"
        raise UsageError(f"--target {target}: a rehearsal runs on the CPUs of this machine: {advice}")
    scenarios = [*SCENARIOS] if only is None else only.split(",")
    if wrong := [name for name in scenarios if name not in SCENARIOS]:
        raise UsageError(f"--only: {wrong[0]!r} is not a disturbance: expected some of {', '.join(SCENARIOS)}")
    flags: dict[str, Any] = {"target": "local", "nodes": nodes or DEFAULT, "gpus": gpus or DEFAULT, "ranks": ranks}
    flags |= {"file": file, "hang_timeout": hang_timeout, "device": "cpu", "command": command or []}
    flags |= {"spares": "0", "checkpoint_copies": "1"}  # this machine has neither
    request = request_of_flags({name: value for name, value in flags.items() if value is not None})
    if request.job.min_nodes < request.job.max_nodes:
        raise UsageError(f"--nodes {nodes}: a rehearsal has a fixed number of nodes: expected such as --nodes 2")
    if request.job.is_uneven:
        raise UsageError(f"--gpus {gpus}: a rehearsal has the same number of ranks on each node: give one number")
    began = time.monotonic()
    runs, interruption = rehearsal.rehearse(
        open_context(), request, steps=steps, shared=shared, links=link or [], scenarios=scenarios
    )
    rows, seconds = judge(runs, scenarios if interruption else ()), time.monotonic() - began
    verdicts = {row.id: row.verdict for row in rows}
    code: int = Exit.OK if verdicts.get("steps") == "ok" else Exit.UNAVAILABLE
    code = Exit.SCRIPT if "fault" in verdicts.values() else code
    if interruption:
        code = code_of(interruption)
        print("\nddpctl: the rehearsal was interrupted: what it did not run to the end is unknown", file=sys.stderr)
    result: dict[str, Any] = {"code": int(code), "seconds": round(seconds, 1), "rows": [asdict(row) for row in rows]}
    print_result(result, [table(rows, seconds, len(runs))], as_json=as_json)
    raise typer.Exit(int(code))


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
