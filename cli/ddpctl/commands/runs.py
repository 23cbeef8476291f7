"""The verbs about runs that are there: ps, status, logs, stop."""

import json
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ddpctl.errors import UsageError
from ddpwire.exits import Exit

if TYPE_CHECKING:
    from ddpctl.desk import Desk
    from ddpctl.run import Run


def complete_run(incomplete: str) -> list[str]:
    """Names of runs for the shell's completion."""
    from ddpctl import runs

    return [run.name for run in runs.load_all(runs.state_dir(os.environ)) if run.name.startswith(incomplete)]


RunName = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="A run's name or its beginning [default: the newest].", autocompletion=complete_run
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def _find(name: str | None) -> "tuple[Desk, Run]":
    from ddpctl import runs
    from ddpctl.desk import open_desk

    desk = open_desk(os.environ)
    return desk, runs.load(desk.root, name)


def ps(
    as_json: Json = False,
    limit: Annotated[int, typer.Option("--last", "-n", min=0, help="Only the newest N; 0: all of them.")] = 20,
) -> None:
    """List runs, newest first."""
    from ddpctl import launch, runs
    from ddpctl.commands import show
    from ddpctl.desk import open_desk

    desk = open_desk(os.environ)
    found = runs.load_all(desk.root)
    shown = found[:limit] if limit else found
    rows = list(zip(shown, launch.status(desk, shown), strict=True))
    if as_json:
        print(json.dumps([show.as_json(run, state) for run, state in rows], indent=1))
        return
    if torn := runs.unreadable(desk.root):
        desk.say(f"passed over, for their record cannot be read: {', '.join(folder.name for folder in torn)}")
    if not rows:
        desk.say(f"no run yet in {desk.root}: start one with ddpctl launch")
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in show.runs_table(rows, time.time()):
        print(line[:width])
    if len(shown) < len(found):
        desk.say(f"{len(found) - len(shown)} older: ddpctl ps --last 0")


def status(run: RunName = None, as_json: Json = False) -> None:
    """Say how a run fares, node by node, and who failed first."""
    from ddpctl import launch, runs
    from ddpctl.commands import show

    desk, record = _find(run)
    (state,) = launch.status(desk, (record,))
    if as_json:
        print(json.dumps(show.as_json(record, state), indent=1))
        return
    for line in show.status_lines(record, state, can_resume=runs.has_checkpoint(record)):
        print(line)


def logs(
    run: RunName = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", "-r", min=0, help="Only this rank; may be repeated.")
    ] = None,
    node: Annotated[list[int] | None, typer.Option("--node", min=0, help="Only this node; may be repeated.")] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, metavar="N", help="Begin with the last N lines of each log.")
    ] = None,
) -> None:
    """Print a run's logs; each line says its node and rank."""
    from ddpctl import launch
    from ddpctl.targets import LogQuery

    desk, record = _find(run)
    query = LogQuery(follow=follow, nodes=tuple(node or ()), ranks=tuple(rank or ()), tail=tail)
    try:
        desk.runner.perform(launch.target_of(record).logs(record, query))
    except KeyboardInterrupt:
        if not launch.status(desk, (record,))[0].ended:
            desk.say(f"{record.name} goes on; ddpctl stop {record.name} ends it")
        raise typer.Exit(int(Exit.INTERRUPTED)) from None


def stop(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="The run's whole name.", autocompletion=complete_run)
    ] = None,
    kill: Annotated[bool, typer.Option("--kill", help="At once, without a checkpoint.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Every run that goes on.")] = False,
) -> None:
    """Let a run save and stop.

    It is killed when its grace is over. Nothing of it is left afterwards.
    """
    from ddpctl import launch, runs
    from ddpctl.commands import show
    from ddpctl.desk import open_desk

    if (run is None) == (not every):
        raise UsageError("stop: name a run, or --all (ddpctl ps lists them)")
    desk = open_desk(os.environ)
    asked = runs.load_all(desk.root) if every else (runs.load(desk.root, run, whole=True),)
    states = list(zip(asked, launch.status(desk, asked), strict=True))
    # A run that was killed from outside may have left something: --kill sweeps it as well.
    going = [
        record
        for record, state in states
        if (not state.ended or (kill and state.state == "lost")) and (not every or state.state != "unknown")
    ]
    for record in going:
        try:
            state = launch.stop(desk, record, kill=kill)
        except KeyboardInterrupt:
            desk.say(f"{record.name} goes on stopping; ddpctl status {record.name} says how far it is")
            raise typer.Exit(int(Exit.INTERRUPTED)) from None
        desk.say(f"run {record.name} {state.state}, exit code {state.code}: {state.message}")
        for line in show.next_steps(record, state, can_resume=runs.has_checkpoint(record)):
            desk.say(line)
    cleared = [record for record, state in states if state.remains and not every]
    for record in cleared:
        launch.clear(desk, record)
        desk.say(f"run {record.name} had ended; what was left of it is gone")
    if not going and not cleared:
        desk.say("no run goes on" if every else f"run {asked[0].name} has ended already: nothing to stop")


def register(app: typer.Typer) -> None:
    """Add these verbs to the program."""
    app.command()(ps)
    app.command()(status)
    app.command()(logs)
    app.command()(stop)
